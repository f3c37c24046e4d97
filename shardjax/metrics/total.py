"""Sums that stay exact over any number of steps, with float32 alone.

A float32 counter stops at 2**24: adding one row more changes nothing. JAX on a device
has no float64 unless x64 is on, so a total is a pair of float32, `hi + lo`, where `lo`
holds what rounding took from `hi` (Knuth's TwoSum; together about 48 bits). XLA keeps
the order of float32 additions, so the compensation survives jit; tests check it.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

# Host arithmetic makes numpy scalars of arrays without dims.
Array = jax.Array | np.ndarray | np.float32

# How many partial sums run beside each other over a batch: enough for the vector units,
# few enough that adding them up in the end costs little.
_LANES = 1024


def _zero() -> np.ndarray:
    return np.zeros((), np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Total:
    """A running sum, scalar or array, as a pair of float32; `Total()` is zero.

    An infinite addend makes the total nan, as nan does.

    Attributes:
      hi: float32 [*shape], the sum rounded to float32.
      lo: float32 [*shape], what the rounding took away.

    Example:
      >>> total = Total().add(np.ones(3, np.float32))
      >>> float(total.merge(total).value())
      6.0
    """

    hi: Array = field(default_factory=_zero)
    lo: Array = field(default_factory=_zero)

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "Total":
        """Makes a total per entry of an array, on the host.

        Args:
          shape: the shape of the array.

        Returns:
          A total of zeros.

        Example:
          >>> Total.zeros((2, 3)).value().shape
          (2, 3)
        """
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    def add(self, values: ArrayLike, weights: ArrayLike | None = None) -> "Total":
        """Adds the values of a batch, each times its weight.

        Args:
          values: [batch]; cast to float32.
          weights: float32 [batch], or None for all one. Where the weight is 0 nothing
            is added, even if the value is nan.

        Returns:
          The new total. The batch is summed with compensation as well.

        Raises:
          ValueError: if the shapes do not fit, or this total is not a scalar.

        Example:
          >>> float(Total().add(np.array([2.0, np.nan]), np.array([3.0, 0.0])).value())
          6.0
        """
        if jnp.shape(self.hi):
            raise ValueError(
                "`add` sums a batch into a scalar total, but this one has shape"
                f" {jnp.shape(self.hi)}. Use `plus` with an array of that shape."
            )
        if jnp.ndim(values) != 1:
            raise ValueError(
                "`values` must have shape [batch], got"
                f" {jnp.shape(values)}. Reduce or flatten them to one value per row."
            )
        values = jnp.asarray(values, jnp.float32)
        if weights is not None:
            if jnp.shape(weights) != values.shape:
                raise ValueError(
                    "`values` and `weights` must both have shape [batch], got"
                    f" {values.shape} and {jnp.shape(weights)}. Give one weight per"
                    " value."
                )
            weights = jnp.asarray(weights, jnp.float32)
            values = jnp.where(weights != 0, values * weights, 0.0)
        return Total(*_add_pairs((self.hi, self.lo), _sum_exactly(values)))

    def plus(self, delta: ArrayLike) -> "Total":
        """Adds an array of the same shape, entry by entry.

        Args:
          delta: [*shape]; cast to float32.

        Returns:
          The new total.

        Raises:
          ValueError: if the shape is another.

        Example:
          >>> Total.zeros((2,)).plus(np.array([1, 2])).value()
          array([1., 2.])
        """
        if jnp.shape(delta) != jnp.shape(self.hi):
            raise ValueError(
                f"`delta` must have the shape of the total, {jnp.shape(self.hi)}, got"
                f" {jnp.shape(delta)}. To sum a batch into a scalar total use `add`."
            )
        delta = jnp.asarray(delta, jnp.float32)
        return Total(*_add_pairs((self.hi, self.lo), (delta, np.float32(0))))

    def merge(self, other: "Total") -> "Total":
        """Joins two totals; on the host if both are there.

        Args:
          other: a total of the same shape.

        Returns:
          Their sum.

        Raises:
          ValueError: if the shape is another.

        Example:
          >>> float(Total().merge(Total()).value())
          0.0
        """
        if jnp.shape(other.hi) != jnp.shape(self.hi):
            raise ValueError(
                "totals to merge must have the same shape, got"
                f" {jnp.shape(self.hi)} and {jnp.shape(other.hi)}. Make both with the"
                " same settings."
            )
        return Total(*_add_pairs((self.hi, self.lo), (other.hi, other.lo)))

    def value(self) -> np.ndarray:
        """Reads the total on the host.

        Returns:
          float64 [*shape]; a float64 scalar for a scalar total.

        Example:
          >>> float(Total().value())
          0.0
        """
        hi, lo = jax.device_get((self.hi, self.lo))
        return np.add(hi, lo, dtype=np.float64)


def _add_pairs(x, y):
    """Adds (hi, lo) pairs: TwoSum of the heads, then the pair is made tight again."""
    head = x[0] + y[0]
    shift = head - x[0]
    rest = (x[0] - (head - shift)) + (y[0] - shift)
    rest = rest + (x[1] + y[1])
    hi = head + rest
    return hi, rest - (hi - head)


def _sum_exactly(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums float32 [batch] into a pair."""
    zero = np.float32(0)
    if values.size > _LANES:
        rows = jnp.pad(values, (0, -values.size % _LANES)).reshape(-1, _LANES)
        # Not zeros: under shard_map the carry must vary over the mesh as the rows do.
        first = (rows[0], rows[0] - rows[0])
        pair = lax.fori_loop(
            1, len(rows), lambda i, pair: _add_pairs(pair, (rows[i], zero)), first
        )
    else:
        pair = (values, jnp.zeros_like(values))
    return tuple(lax.reduce(pair, (zero, zero), _add_pairs, (0,)))

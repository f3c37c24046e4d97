"""AUC from histograms over a grid that is fine where clicks are rare.

Sorting all predictions is neither mergeable nor cheap, so predictions fall into bins,
and a pair of a positive and a negative in one bin counts half. The grid has bins of
equal *relative* width at both ends, because click predictions of 0.001 and 0.0011
differ as much as 0.1 and 0.11: the bin of p is taken from the exponent and the first
bits of the mantissa of p (below 1/2) or of 1 - p (above), which is exact, monotone and
needs no logarithm::

    first bin    2**m bins per octave of p    of 1 - p, downwards      last bin
    [0, 2**-40)  [2**-40, ...          1/2)   [1/2, ...  1 - 2**-24]   1

With the default 16384 bins m is 8: two predictions below 1/2 share a bin only if they
differ by less than 1/256 of their value.
"""

from dataclasses import field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardjax.metrics.log_loss import check_inside, count_outside
from shardjax.metrics.metric import Metric, check_columns, pick_column, ratio, static
from shardjax.metrics.total import Array, Total


class AUC(Metric):
    """Area under the ROC curve, weighted, from `bins` bins.

    The result is within `error_bound` of the exact value for certain; in practice the
    error is far below that, as the order inside a bin is nearly random: see
    docs/metrics.md. nan when there is no positive or no negative (also when empty), and
    when a label or prediction is nan. A label between 0 and 1 counts as that part of a
    positive and the rest of a negative.

    Attributes:
      bins: number of bins, a power of two from 1024 to 2**20; the state takes 16 bytes
        for each.
      positives: weight of the positives in each bin, [bins].
      negatives: weight of the negatives in each bin, [bins].
      outside: number of rows with a label or prediction outside [0, 1].

    Raises:
      TypeError: if `bins` is not an integer.
      ValueError: if it is not such a power of two.

    Example:
      >>> y, p = jnp.array([0.0, 1.0, 0.0]), jnp.array([0.1, 0.2, 0.3])
      >>> AUC().update(labels=y, predictions=p, weights=jnp.ones(3)).compute()
      0.5
    """

    bins: int = static(default=16384)
    positives: Total = Total()
    negatives: Total = Total()
    outside: Total = Total()

    def __post_init__(self):
        _check_bins(self, 1024)
        # The empty state has as many zeros as `bins` says.
        for name in ("positives", "negatives"):
            if jnp.ndim(getattr(self, name).hi) == 0:
                object.__setattr__(self, name, Total.zeros((self.bins,)))

    def update(self, *, labels, predictions, weights, **extras):
        check_columns(labels=labels, predictions=predictions, weights=weights)
        at = _bins_of(predictions, self.bins, _WIDE)
        empty = jnp.zeros(self.bins, jnp.float32)
        positive, negative = _split(labels, weights)
        return self.replace(
            positives=self.positives.plus(empty.at[at].add(positive, mode="drop")),
            negatives=self.negatives.plus(empty.at[at].add(negative, mode="drop")),
            outside=self.outside.plus(count_outside(labels, predictions, weights)),
        )

    def compute(self) -> float:
        """Reads the AUC.

        Returns:
          The area, 0.5 for random predictions.

        Raises:
          ValueError: if labels or predictions were outside [0, 1].

        Example:
          >>> AUC().compute()
          nan
        """
        check_inside(self, self.outside)
        if np.isnan(self.outside.value()):
            return float("nan")
        area, _ = _areas(self.positives.value(), self.negatives.value())
        return float(area)

    def error_bound(self) -> float:
        """Bounds the error that the bins make.

        Half of the pairs of a positive and a negative that share a bin:
        sum(pos * neg) / (2 * sum(pos) * sum(neg)).

        Returns:
          The bound; nan when the AUC is not defined.

        Example:
          >>> y, p = jnp.array([0.0, 1.0]), jnp.array([0.5, 0.5])
          >>> AUC().update(labels=y, predictions=p, weights=p).error_bound()
          0.5
        """
        _, shared = _areas(self.positives.value(), self.negatives.value())
        return float(shared / 2)


class GAUC(Metric):
    """AUC within each group (user), averaged with the groups' weight of rows.

    Only groups with both a positive and a negative count; nan if there is none. Needs
    the extra `groups`, int32 [batch], ids in [0, groups). Each device keeps 8 bytes per
    group and bin, plain float32: a cell is exact up to a weight of 2**24.

    Attributes:
      groups: number of groups, positive.
      bins: bins per group, a power of two from 128 to 2**20. Half the octaves of `AUC`
        (down to 2**-20), so 16 bins per octave at 512, as a group has few rows.
      positives: float32 [groups, bins], weight of the positives.
      negatives: float32 [groups, bins], weight of the negatives.
      outside: number of rows with a label or prediction outside [0, 1].
      unknown: number of rows with a group id outside [0, groups).

    Raises:
      TypeError: if `groups` or `bins` is not an integer.
      ValueError: if they are out of range.

    Example:
      >>> y, p = jnp.array([0.0, 1.0, 1.0]), jnp.array([0.1, 0.2, 0.3])
      >>> GAUC(groups=2).update(labels=y, predictions=p, weights=jnp.ones(3),
      ...                       groups=jnp.array([1, 1, 0])).compute()
      1.0
    """

    groups: int = static()
    bins: int = static(default=512)
    positives: Array = field(default_factory=lambda: np.zeros((), np.float32))
    negatives: Array = field(default_factory=lambda: np.zeros((), np.float32))
    outside: Total = Total()
    unknown: Total = Total()

    def __post_init__(self):
        _check_integer(self, "groups")
        if self.groups < 1:
            raise ValueError(
                f"`groups` of GAUC must be positive, got {self.groups}. Give the number"
                " of groups; ids are 0 to groups - 1."
            )
        _check_bins(self, 128)
        # The empty state has as many zeros as the settings say.
        for name in ("positives", "negatives"):
            if jnp.ndim(getattr(self, name)) == 0:
                cells = np.zeros((self.groups, self.bins), np.float32)
                object.__setattr__(self, name, cells)

    def update(self, *, labels, predictions, weights, **extras):
        groups = jnp.asarray(pick_column(self, "groups", extras))
        check_columns(
            labels=labels, predictions=predictions, weights=weights, groups=groups
        )
        if not jnp.issubdtype(groups.dtype, jnp.integer):
            raise TypeError(
                f"`groups` must be integers, got dtype {groups.dtype}. Number the"
                " groups from 0 as int32."
            )
        at = _bins_of(predictions, self.bins, _NARROW)
        known = (groups >= 0) & (groups < self.groups)
        unknown = jnp.sum(jnp.where((jnp.asarray(weights) != 0) & ~known, 1.0, 0.0))
        # Past the end, so that `drop` leaves it out: a negative id would count from the
        # end. All are in `unknown`, and `compute` refuses to go on.
        rows = jnp.where(known, groups, self.groups)
        positive, negative = _split(labels, weights)
        return self.replace(
            positives=jnp.asarray(self.positives)
            .at[rows, at]
            .add(positive, mode="drop"),
            negatives=jnp.asarray(self.negatives)
            .at[rows, at]
            .add(negative, mode="drop"),
            outside=self.outside.plus(count_outside(labels, predictions, weights)),
            unknown=self.unknown.plus(unknown),
        )

    def compute(self) -> float:
        """Reads the GAUC.

        Returns:
          sum(weight * AUC) / sum(weight) over the groups with both classes.

        Raises:
          ValueError: if group ids were outside [0, groups), or labels or predictions
            outside [0, 1].

        Example:
          >>> GAUC(groups=3).compute()
          nan
        """
        check_inside(self, self.outside)
        unknown = self.unknown.value()
        if unknown > 0:
            raise ValueError(
                f"group ids of {self} must be in [0, {self.groups}), got"
                f" {int(unknown)} rows outside. Raise `groups`, or number the groups"
                " from 0 without gaps."
            )
        if np.isnan(self.outside.value()):
            return float("nan")
        return self._average(0)

    def error_bound(self) -> float:
        """Bounds the error that the bins make, as `AUC.error_bound` group by group.

        Returns:
          The bound; nan when the GAUC is not defined.

        Example:
          >>> GAUC(groups=3).error_bound()
          nan
        """
        return self._average(1) / 2

    def _average(self, part: int) -> float:
        positives, negatives = jax.device_get((self.positives, self.negatives))
        weight = (positives + negatives).sum(axis=-1, dtype=np.float64)
        values = _areas(positives, negatives)[part]
        both = ~np.isnan(values)
        return ratio((weight * values)[both].sum(), weight[both].sum())


# Octaves of p below 1, and of 1 - p. _WIDE goes up to 1 - 2**-24, the last float32
# below 1, and down to 2**-40. The octaves above 1/2 stay empty, which leaves room for
# the bins at the ends and for 1/2 itself.
_WIDE = (40, 24)
_NARROW = (20, 12)


def _bins_of(predictions, bins: int, octaves: tuple[int, int]) -> jax.Array:
    """int32 [batch]: the bin of each prediction, in [0, bins), non-decreasing in p."""
    low, high = octaves
    drop = 23 - ((bins // (low + high)).bit_length() - 1)
    p = jnp.asarray(predictions, jnp.float32)

    def steps(x, octaves):
        # 127 is the exponent bias; what is below the first octave is negative here. The
        # upper end only catches nan.
        first, per_octave = 127 - octaves, 1 << (23 - drop)
        bits = lax.bitcast_convert_type(x, jnp.int32) >> drop
        return jnp.clip(bits - first * per_octave + 1, 0, octaves * per_octave)

    # 1 - p is exact for p >= 1/2.
    return jnp.where(p < 0.5, steps(p, low), bins - 1 - steps(1 - p, high))


def _split(labels, weights) -> tuple[jax.Array, jax.Array]:
    """float32 [batch] twice: the weight of each row as a positive and as a negative."""
    weights = jnp.asarray(weights, jnp.float32)
    labels = jnp.where(weights != 0, labels, 0.0)
    return weights * labels, weights * (1 - labels)


def _areas(positives, negatives) -> tuple[np.ndarray, np.ndarray]:
    """AUC over the last dim, and the share of pairs within one bin; nan if no pair."""
    positives, negatives = np.float64(positives), np.float64(negatives)
    below = np.cumsum(negatives, axis=-1) - negatives / 2
    pairs = positives.sum(axis=-1) * negatives.sum(axis=-1)
    with np.errstate(invalid="ignore"):
        area = (positives * below).sum(axis=-1) / pairs
        shared = (positives * negatives).sum(axis=-1) / pairs
    return area, shared


def _check_integer(metric: AUC | GAUC, name: str) -> None:
    value = getattr(metric, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{name}` of {type(metric).__name__} must be an integer, got"
            f" {type(value).__name__} {value!r}. Give an int."
        )


def _check_bins(metric: AUC | GAUC, least: int) -> None:
    _check_integer(metric, "bins")
    bins = metric.bins
    if not least <= bins <= 2**20 or bins & (bins - 1):
        raise ValueError(
            f"`bins` of {type(metric).__name__} must be a power of two from {least} to"
            f" 2**20, got {bins}. Give for example {max(least, 4096)}."
        )

"""64-bit keys on devices: pairs of uint32 words, for JAX has no 64-bit integers by default.

The hash is that of the host (`shardjax.embed.index.mix64`), to the bit, so that a key has
the same owner on either side.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from shardjax.embed.jagged import as_keys

Words = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]

_32 = np.uint64(32)
_HALF = 0xFFFF


def split_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits keys into their high and low words.

    Args:
      keys: uint64, any shape; other integers as `as_keys`.

    Returns:
      (hi, lo), uint32 of the same shape.

    Raises:
      TypeError: if the keys are not integers.

    Example:
      >>> split_keys(np.array([7, 2**64 - 1], np.uint64))
      (array([         0, 4294967295], dtype=uint32), array([         7, 4294967295],
            dtype=uint32))
    """
    keys = as_keys(keys, "keys")
    return (keys >> _32).astype(np.uint32), keys.astype(np.uint32)


def join_keys(hi: ArrayLike, lo: ArrayLike) -> np.ndarray:
    """Joins words, uint32 of any shape, to keys on the host: the inverse of `split_keys`.

    Example:
      >>> int(join_keys(np.uint32(1), np.uint32(2))) == 2**32 + 2
      True
    """
    return np.asarray(hi).astype(np.uint64) << _32 | np.asarray(lo).astype(np.uint64)


def mix64(hi: jax.Array, lo: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The finalizer of splitmix64 (Steele et al. 2014) of keys in words, uint32."""
    hi, lo = _times(*_shifted(hi, lo, 30), 0xBF58476D1CE4E5B9)
    hi, lo = _times(*_shifted(hi, lo, 27), 0x94D049BB133111EB)
    return _shifted(hi, lo, 31)


def _shifted(hi, lo, bits):
    """x ^ x >> bits, for bits below 32."""
    return hi ^ hi >> bits, lo ^ (lo >> bits | hi << (32 - bits))


def _times(hi, lo, factor):
    """The low 64 bits of a product with a constant, by products of 16 bits."""
    upper, lower = jnp.uint32(factor >> 32), jnp.uint32(factor & 0xFFFFFFFF)
    a, b = lo & _HALF, lo >> 16
    c, d = lower & _HALF, lower >> 16
    low = a * c
    middle = b * c + (low >> 16)
    other = a * d + (middle & _HALF)
    carried = b * d + (middle >> 16) + (other >> 16)
    return carried + lo * upper + hi * lower, other << 16 | low & _HALF


def owner_of(hashed_hi: jax.Array, devices: int) -> jax.Array:
    """The device that owns a key, int32, by the high word of its hash.

    The high 16 bits number 2**16 logical buckets, of which a device owns a contiguous
    range, as on the host.
    """
    return ((hashed_hi >> 16) * jnp.uint32(devices) >> 16).astype(jnp.int32)

"""The static half of a plan: which arrays it has, how large, and where in the transfer.

A step's int32 and float32 arrays travel as one int32 array ``[devices, words]``, so that
a step costs one transfer however many features it has. A `Layout` says where each array
lies; it is hashable and the only static argument of the compiled step: two batches with
equal layouts run the same program. Sizes come from a ladder, so that they are equal often.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


def rung(count: int, smallest: int = 64) -> int:
    """The smallest step of the ladder that is at least `count`.

    The ladder has eight steps per octave: at most an eighth of an array is padding.

    Example:
      >>> [rung(n) for n in (1, 64, 65, 1000, 1025)]
      [64, 64, 72, 1024, 1152]
    """
    if count <= smallest:
        return smallest
    step = 1 << max(int(count - 1).bit_length() - 4, 0)
    return -(-count // step) * step


@dataclass(frozen=True)
class Field:
    """One array within the transfer.

    Attributes:
      name: unique within the layout.
      shape: of one device's part.
      is_float: float32 rather than int32.
      offset: first word.
    """

    name: str
    shape: tuple[int, ...]
    is_float: bool
    offset: int

    @property
    def size(self) -> int:
        """Number of words."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class SequenceLayout:
    """A feature with combiner `none`: `length` positions per example."""

    name: str
    length: int


@dataclass(frozen=True)
class GroupLayout:
    """What a plan says of one group (one slab).

    Attributes:
      name: of the group; prefix of its fields.
      replicated: placement `data_parallel`.
      rows: unique rows per owner, padding included.
      send: rows each owner sends each requester, padding included; 0 where nothing has
        to be exchanged (one device, or replicated).
      fixed: names of the features with one key per example, in column order.
      pooled: names and combiners of the jagged features that are pooled.
      values: ids of the pooled features per requester, padding included.
      weighted: whether the ids of the pooled features have weights.
      sequences: the features with combiner `none`.
      stored: rows per owner that come with the batch because they are not on its device,
        padding included; for evaluation.
    """

    name: str
    replicated: bool
    rows: int
    send: int
    fixed: tuple[str, ...]
    pooled: tuple[tuple[str, str], ...]
    values: int
    weighted: bool
    sequences: tuple[SequenceLayout, ...]
    stored: int = 0

    def received(self, devices: int) -> int:
        """Rows a requester has to choose from."""
        return self.send * devices if self.send else self.rows


@dataclass(frozen=True)
class Layout:
    """The static description of a step's transfer.

    Attributes:
      devices: of the mesh.
      examples: per device, padding included.
      groups: one per slab.
      fields: the arrays.
    """

    devices: int
    examples: int
    groups: tuple[GroupLayout, ...]
    fields: tuple[Field, ...]

    @property
    def words(self) -> int:
        """Words per device."""
        last = self.fields[-1]
        return last.offset + last.size

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The arrays of one device, from its int32 [words]; for use in a jitted step."""
        arrays = {}
        for f in self.fields:
            words = jax.lax.slice(packed, (f.offset,), (f.offset + f.size,))
            if f.is_float:
                words = jax.lax.bitcast_convert_type(words, jnp.float32)
            arrays[f.name] = words.reshape(f.shape)
        return arrays


def pack(
    devices: int,
    examples: int,
    groups: tuple[GroupLayout, ...],
    arrays: dict[str, np.ndarray],
    own: int | None = None,
) -> tuple[np.ndarray, Layout]:
    """Lays int32 and float32 arrays, [own, ...] each, one after the other.

    Args:
      devices, examples, groups: of the layout.
      arrays: by field name.
      own: devices that they are of; None for all.

    Returns:
      The transfer, int32 [own, words], and its layout.

    Raises:
      TypeError: for another dtype.
      ValueError: for an array without the leading dim of devices.
    """
    own = devices if own is None else own
    fields = []
    offset = 0
    for name, array in arrays.items():
        if array.dtype not in (np.int32, np.float32):
            raise TypeError(
                f"array {name!r} of a step must be int32 or float32, got {array.dtype}"
            )
        if array.shape[:1] != (own,):
            raise ValueError(
                f"array {name!r} of a step must have {own} (devices) as its first dim,"
                f" got shape {array.shape}"
            )
        field = Field(name, array.shape[1:], array.dtype == np.float32, offset)
        fields.append(field)
        offset += field.size
    packed = np.empty((own, offset), np.int32)
    for f in fields:
        words = arrays[f.name].reshape(own, f.size)
        packed[:, f.offset : f.offset + f.size] = words.view(np.int32)
    return packed, Layout(devices, examples, groups, tuple(fields))

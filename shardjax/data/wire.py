"""Rows as bytes, to be sent from process to process."""

import json

import numpy as np

from shardjax.data.batch import Batch
from shardjax.embed.jagged import Jagged

_ALIGNMENT = 8


def pack(batch: Batch) -> bytes:
    """Writes rows as bytes: a header of JSON, then the arrays as they are.

    Args:
      batch: the rows; `bad_lines` is left out.

    Returns:
      Bytes for `unpack`.

    Example:
      >>> batch = Batch([0, 1], np.zeros((2, 0)), np.zeros((0, 2), int))
      >>> unpack(pack(batch)).labels
      array([0., 1.], dtype=float32)
    """
    arrays = [batch.labels, batch.dense, batch.fixed]
    for name in batch.jagged:
        bags = batch.jagged[name]
        arrays += [bags.values, bags.lengths]
        arrays += [] if bags.weights is None else [bags.weights]
    arrays += [a for a in (batch.weights, batch.groups) if a is not None]
    values = [len(bags.values) for bags in batch.jagged.values()]
    header = json.dumps([layout_of(batch), batch.size, values]).encode()
    parts = [len(header).to_bytes(_ALIGNMENT, "little"), header, _pad(len(header))]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1)
        parts += [flat.view(np.uint8).data, _pad(array.nbytes)]
    return b"".join(parts)


def unpack(data: bytes) -> Batch:
    """Reads the rows that `pack` wrote.

    Args:
      data: what `pack` returned.

    Returns:
      The rows; arrays are views of `data`, and may not be written to.

    Raises:
      ValueError: if the bytes are not whole.
    """
    size = int.from_bytes(data[:_ALIGNMENT], "little")
    layout, rows, values = json.loads(data[_ALIGNMENT : _ALIGNMENT + size])
    at = _ALIGNMENT + size + len(_pad(size))

    def take(dtype, *shape: int) -> np.ndarray:
        nonlocal at
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, dtype, count, at) if count else np.empty(0, dtype)
        at += array.nbytes + len(_pad(array.nbytes))
        return array.reshape(shape)

    labels = take(np.float32, rows)
    dense = take(np.float32, rows, layout["n_dense"])
    fixed = take(np.uint64, len(layout["fixed"]), rows)
    jagged = {}
    for (name, weighted), total in zip(layout["jagged"], values, strict=True):
        bags = take(np.uint64, total), take(np.int32, rows)
        jagged[name] = Jagged(*bags, take(np.float32, total) if weighted else None)
    weights = take(np.float32, rows) if layout["weights"] else None
    groups = take(np.uint64, rows) if layout["groups"] else None
    names = tuple(layout["fixed"])
    return Batch(labels, dense, fixed, names, jagged, weights, groups)


def layout_of(batch: Batch) -> dict:
    """Says which arrays a batch has, as JSON can hold it.

    Args:
      batch: any rows.

    Returns:
      What `no_rows` makes a batch of. Rows of equal layouts can be joined.

    Example:
      >>> batch = Batch([0, 1], np.zeros((2, 3)), np.zeros((1, 2), int), ("item",))
      >>> layout_of(batch)["n_dense"], no_rows(layout_of(batch)).fixed.shape
      (3, (1, 0))
    """
    return {
        "n_dense": batch.n_dense,
        "fixed": list(batch.fixed_names),
        "jagged": [[n, b.weights is not None] for n, b in batch.jagged.items()],
        "weights": batch.weights is not None,
        "groups": batch.groups is not None,
    }


def no_rows(layout: dict) -> Batch:
    """Makes a batch of no rows.

    Args:
      layout: which arrays it has, as of `layout_of`.

    Returns:
      The batch.
    """
    none = np.zeros(0, np.uint64)
    return Batch(
        np.zeros(0, np.float32),
        np.zeros((0, layout["n_dense"]), np.float32),
        np.zeros((len(layout["fixed"]), 0), np.uint64),
        tuple(layout["fixed"]),
        {
            name: Jagged(none, none, none if weighted else None)
            for name, weighted in layout["jagged"]
        },
        none if layout["weights"] else None,
        none if layout["groups"] else None,
    )


def _pad(size: int) -> bytes:
    return bytes(-size % _ALIGNMENT)

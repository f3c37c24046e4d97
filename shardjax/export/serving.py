"""Scores of an exported model, where nothing is trained.

This file needs NumPy and JAX and nothing else of shardjax. `export_model` puts a copy of it
into the folder of each model, so that one can be served where shardjax is not installed::

    import sys
    sys.path.insert(0, "model")                    # the folder of the model
    from serving import Bags, load_model

    model = load_model("model")
    scores = model(dense, {"item_id": keys, "history": Bags(keys, lengths, weights)})

Rows stay in their files, which are mapped into memory. A key without a row reads zeros, as
it does in evaluation while training.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

FORMAT = 1
_LEAST_BATCH = 8


class CorruptModelError(OSError):
    """A file of a model is not what was written."""


class Bags(NamedTuple):
    """Keys of one feature for a batch, any number per example, one after the other.

    A `shardjax.embed.Jagged` will do in its place.

    Attributes:
      values: integers [total].
      lengths: integers [batch], how many belong to each example; their sum is `total`.
      weights: floats [total], or None for all one.
    """

    values: Any
    lengths: Any
    weights: Any = None


class Rows:
    """The rows of one table, by key.

    Args:
      folder: of the model.
      about: the table, as model.json has it.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]):
        self.name: str = about["name"]
        self.dim: int = about["dim"]
        self.dtype = jnp.dtype(about["dtype"])
        self._vectors = np.load(folder / about["vectors"], mmap_mode="r")
        self._keys, self._places = np.load(folder / about["index"], mmap_mode="r")

    def __len__(self) -> int:
        return len(self._keys)

    def lookup(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows.

        Args:
          keys: integers [n]; signed ones count modulo 2**64.

        Returns:
          The rows, [n, dim] of the table's dtype, zeros for a key without one; and which
          keys have one, bool [n].

        Raises:
          TypeError: for keys that are not integers.
        """
        return self._read(_as_keys(keys, f"table {self.name!r}"))

    def _read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        unique, inverse = np.unique(keys, return_inverse=True)
        rows = np.zeros((len(unique), self.dim), self.dtype)
        found = np.zeros(len(unique), bool)
        if len(self):
            at = np.searchsorted(self._keys, unique)
            at = np.minimum(at, len(self) - 1)
            found = self._keys[at] == unique
            places = self._places[at[found]].astype(np.int64)
            rows[found] = self._vectors[places]
        return rows[inverse], found[inverse]


class Model:
    """A network and the rows of its tables; made by `load_model`.

    Attributes:
      n_dense: dense features of an example.
      features: names of the features with keys.
      tables: `Rows` by table.
      step: of training, that the model is of.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]):
        self.n_dense: int = about["n_dense"]
        self.step: int = about["step"]
        self.tables = {t["name"]: Rows(folder, t) for t in about["tables"]}
        self._features = {f["name"]: f for f in about["features"]}
        with np.load(folder / about["params"]) as file:
            arrays = [file[str(n)] for n in range(len(file.files))]
        network = export.deserialize(
            bytearray((folder / about["network"]).read_bytes())
        )
        # NumPy has written dtypes that it lacks as plain bytes
        shapes = network.in_avals[: len(arrays)]
        self._params = [
            jnp.asarray(x.view(shape.dtype))
            for x, shape in zip(arrays, shapes, strict=True)
        ]
        self._call = jax.jit(network.call)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features with keys."""
        return tuple(self._features)

    def __call__(self, dense: Any, features: Mapping[str, Any]) -> np.ndarray:
        """Scores examples.

        The network is compiled once for each power of two that is the size of a batch,
        rounded up; the examples that are too many are zeros.

        Args:
          dense: numbers [batch, n_dense].
          features: by name: integers [batch], a key per example, or `Bags`. Features
            that the model does not read are not looked at.

        Returns:
          Predictions, float32 [batch].

        Raises:
          ValueError: for missing features, shapes and lengths that do not fit, ids
            outside a fixed vocabulary and sequences that are too long, unless the
            feature permits them.
          TypeError: for numbers of another kind.
        """
        dense = _as_floats(dense, "`dense`")
        if dense.ndim != 2 or dense.shape[1] != self.n_dense:
            raise ValueError(
                f"`dense` must have shape [batch, {self.n_dense}], got {dense.shape}"
            )
        batch = len(dense)
        inputs = self.embed(features, batch)
        if not batch:
            return np.zeros(0, np.float32)
        size = max(_power_of_two(batch), _LEAST_BATCH)

        def pad(x):
            return np.pad(x, [(0, size - batch)] + [(0, 0)] * (x.ndim - 1))

        dense, inputs = jax.tree.map(pad, (dense, inputs))
        return np.asarray(self._call(self._params, dense, inputs))[:batch]

    def embed(self, features: Mapping[str, Any], batch: int) -> dict[str, Any]:
        """The vectors that the network reads.

        Args:
          features: as of a call.
          batch: examples.

        Returns:
          By feature: [batch, dim] of its table's dtype; with combiner "none", a dict of
          `values` [batch, length, dim] and `mask`, bool [batch, length].

        Raises:
          ValueError, TypeError: as of a call.
        """
        if missing := [name for name in self._features if name not in features]:
            raise ValueError(
                f"the batch lacks the features {missing}: the model reads"
                f" {list(self._features)}, the batch has {list(features)}"
            )
        return {
            name: self._embed(about, features[name], batch)
            for name, about in self._features.items()
        }

    def _embed(self, about: Mapping[str, Any], value: Any, batch: int) -> Any:
        keys, lengths, weights = _as_bags(about, value, batch)
        keys, lengths, weights = _without_padding(about, keys, lengths, weights)
        if about["combiner"] == "none":
            keys, lengths = _shortened(about, keys, lengths)
        good = np.ones(len(keys), bool)
        if about["vocabulary"] is not None:
            good = keys < np.uint64(about["vocabulary"])
            if about["on_bad_id"] == "error" and not good.all():
                raise ValueError(
                    f"feature {about['name']!r} has the id"
                    f" {int(keys[~good][0].astype(np.int64))}, and its table"
                    f" {about['table']!r} has the vocabulary [0, {about['vocabulary']})"
                )
            if about["on_bad_id"] == "drop":
                keys, lengths, weights = _without(~good, keys, lengths, weights)
                good = np.ones(len(keys), bool)
        vectors, _ = self.tables[about["table"]]._read(keys)
        vectors[~good] = 0
        if about["combiner"] == "none":
            return _as_sequence(about, vectors, lengths)
        return _pool(about["combiner"], vectors, lengths, weights)


def load_model(directory: str | os.PathLike, *, verify: bool = True) -> Model:
    """Loads what `export_model` has written.

    The network is loaded into memory, rows stay in their files.

    Args:
      directory: of the model.
      verify: whether to read all files and compare them with what was written; without,
        only their sizes are compared.

    Raises:
      FileNotFoundError: if there is no model.
      CorruptModelError: if a file is missing, or not what was written.
      ValueError: if it has a format that this version does not know.
    """
    folder = Path(directory)
    try:
        about = json.loads((folder / "model.json").read_text())
        about["format"]
    except (ValueError, TypeError, KeyError):
        raise CorruptModelError(
            f"model.json in {str(directory)!r} is not what was written. Export the model"
            " again, or restore the file from a copy"
        ) from None
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no model in {str(directory)!r}: it has no model.json. Give a folder"
            " that `export_model` has written"
        ) from None
    if about["format"] != FORMAT:
        raise ValueError(
            f"the model in {str(directory)!r} has format {about['format']}, and this file"
            f" reads format {FORMAT}. Use the serving.py that is beside the model"
        )
    for name, (size, crc) in about["files"].items():
        _check_file(folder / name, size, crc if verify else None)
    return Model(folder, about)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            crc = zlib.crc32(part, crc)
    return crc


def _check_file(path: Path, size: int, crc: int | None) -> None:
    fix = "Export the model again, or restore the file from a copy"
    if not path.is_file():
        raise CorruptModelError(f"the model's file {str(path)!r} is missing. {fix}")
    found = path.stat().st_size
    if found != size:
        raise CorruptModelError(
            f"the model's file {str(path)!r} must have {size} bytes, got {found}. {fix}"
        )
    if crc is not None and checksum(path) != crc:
        raise CorruptModelError(
            f"the model's file {str(path)!r} is not what was written: its checksum differs."
            f" {fix}"
        )


def _as_keys(values: Any, what: str) -> np.ndarray:
    """Integers [n] as uint64, signed ones modulo 2**64."""
    values = np.asarray(values)
    if not values.size and values.dtype.kind == "f":
        values = values.astype(np.uint64)  # an empty list
    if values.dtype.kind not in "iu":
        raise TypeError(
            f"keys of {what} must be integers, got dtype {values.dtype}. Hash strings as"
            " it was done for training"
        )
    if values.ndim != 1:
        raise ValueError(f"keys of {what} must have one dim, got shape {values.shape}")
    return values.astype(np.uint64)


def _as_floats(values: Any, what: str) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{what} must be real numbers, got dtype {values.dtype}")
    return values.astype(np.float32)


def _as_bags(
    about: Mapping[str, Any], value: Any, batch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """A feature of a batch as keys, lengths and weights, checked."""
    what = f"feature {about['name']!r}"
    if not hasattr(value, "lengths"):
        keys = _as_keys(value, what)
        if keys.shape != (batch,):
            raise ValueError(
                f"{what} must have one key per example, shape ({batch},), got"
                f" {keys.shape}. Wrap several keys per example in Bags"
            )
        return keys, np.ones(batch, np.int64), None
    keys, lengths = _as_keys(value.values, what), np.asarray(value.lengths)
    if lengths.dtype.kind not in "iu":
        raise TypeError(
            f"`lengths` of {what} must be integers, got dtype {lengths.dtype}"
        )
    if lengths.shape != (batch,):
        raise ValueError(
            f"{what} must have {batch} `lengths`, one per example, got shape"
            f" {lengths.shape}"
        )
    if batch and lengths.min() < 0:
        at = int(np.argmax(lengths < 0))
        raise ValueError(
            f"`lengths` of {what} must not be negative, got {lengths[at]} for example {at}"
        )
    lengths = lengths.astype(np.int64)
    if lengths.sum() != len(keys):
        raise ValueError(
            f"`lengths` of {what} must add up to the number of `values`, got"
            f" {lengths.sum()} and {len(keys)}"
        )
    if value.weights is None:
        return keys, lengths, None
    if about["combiner"] == "none":
        raise ValueError(
            f"{what} has combiner 'none' and cannot have weights: nothing is summed"
        )
    weights = _as_floats(value.weights, f"`weights` of {what}")
    if weights.shape != keys.shape:
        raise ValueError(
            f"`weights` of {what} must have one entry per value, got shapes"
            f" {weights.shape} and {keys.shape}"
        )
    return keys, lengths, weights


def _without(gone, keys, lengths, weights):
    """Keys, lengths and weights without some of the keys."""
    if gone.any():
        examples = np.repeat(np.arange(len(lengths)), lengths)[~gone]
        lengths = np.bincount(examples, minlength=len(lengths))
        keys, weights = keys[~gone], None if weights is None else weights[~gone]
    return keys, lengths, weights


def _without_padding(about: Mapping[str, Any], keys, lengths, weights):
    if about["padding_id"] is None:
        return keys, lengths, weights
    padding = keys == np.uint64(about["padding_id"] % 2**64)
    return _without(padding, keys, lengths, weights)


def _shortened(about: Mapping[str, Any], keys, lengths):
    """Sequences of at most `max_length` keys."""
    limit = about["max_length"]
    if limit is None or not len(lengths) or lengths.max() <= limit:
        return keys, lengths
    if about["on_long"] == "error":
        at = int(np.argmax(lengths))
        raise ValueError(
            f"feature {about['name']!r} has {lengths[at]} keys for example {at} and its"
            f" `max_length` is {limit}"
        )
    place = _places(lengths)
    if about["on_long"] == "last":
        place = np.repeat(lengths, lengths) - 1 - place
    keys, lengths, _ = _without(place >= limit, keys, lengths, None)
    return keys, lengths


def _places(lengths: np.ndarray) -> np.ndarray:
    """The place of each key in its bag, [total]."""
    return np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _pool(combiner: str, vectors, lengths, weights) -> np.ndarray:
    """Pools bags as the device does: in order, and with zeros for a zero divisor."""
    if weights is not None:
        vectors = vectors * weights[:, None].astype(vectors.dtype)
    sums = _sum(vectors, lengths)
    if combiner == "sum":
        return sums
    if weights is None:
        weights = np.ones(len(vectors), np.float32)
    if combiner == "mean":
        divisors = _sum(weights, lengths)
    else:
        divisors = np.sqrt(_sum(weights * weights, lengths))
    nonzero = divisors != 0
    scale = np.where(nonzero, 1 / np.where(nonzero, divisors, 1), 0)
    return sums * scale[:, None].astype(sums.dtype)


def _sum(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums of bags, [batch, ...], each added up in its order."""
    sums = np.zeros((len(lengths), *values.shape[1:]), values.dtype)
    starts = _starts(lengths)
    longer = np.flatnonzero(lengths)
    place = 0
    while len(longer):
        sums[longer] += values[starts[longer] + place]
        place += 1
        longer = longer[lengths[longer] > place]
    return sums


def _as_sequence(about: Mapping[str, Any], vectors, lengths) -> dict[str, np.ndarray]:
    longest = int(lengths.max()) if len(lengths) else 0
    length = about["max_length"] or _power_of_two(max(longest, 1))
    mask = np.arange(length) < lengths[:, None]
    values = np.zeros((*mask.shape, vectors.shape[1]), vectors.dtype)
    values[mask] = vectors
    return {"values": values, "mask": mask}


def _power_of_two(count: int) -> int:
    """The smallest that is at least `count`."""
    return 1 << (count - 1).bit_length()

"""A batch's features as the planner wants them, checked."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardjax.embed.jagged import Jagged, as_keys
from shardjax.embed.spec import FeatureSpec
from shardjax.embed.translate import truncate


@dataclass(frozen=True)
class AskedKeys(Jagged):
    """Unique keys that requesters ask owners for, one "example" per requester.

    Attributes:
      counts: int64 [total], how many ids each stands for; None for one.
      scores: int64 [total], what ShowClick scores grow by; None where nobody counts them.
    """

    counts: np.ndarray | None = None
    scores: np.ndarray | None = None


@dataclass(frozen=True)
class Input:
    """One feature of a batch.

    Attributes:
      spec: of the feature.
      keys: uint64 [n], of all examples in order.
      bounds: int64 [requesters + 1], where each requester's keys start.
      example_bounds: int64 [requesters + 1], where its examples start.
      lengths: int32 [batch] keys per example, or None: one each.
      weights: float32 [n] or None.
      truncated: keys cut off.
      padding: keys left out already because they are the feature's `padding_id`.
      counts, scores: as of `AskedKeys`.
    """

    spec: FeatureSpec
    keys: np.ndarray
    bounds: np.ndarray
    example_bounds: np.ndarray
    lengths: np.ndarray | None = None
    weights: np.ndarray | None = None
    truncated: int = 0
    padding: int = 0
    counts: np.ndarray | None = None
    scores: np.ndarray | None = None

    @property
    def longest(self) -> int:
        """The largest number of keys of one example."""
        if self.lengths is None or not len(self.lengths):
            return 1
        return max(int(self.lengths.max()), 1)


def normalize(
    values: Mapping[str, np.ndarray | Jagged],
    specs: Mapping[str, FeatureSpec],
    batch: int,
    examples: int,
    requesters: int,
) -> dict[str, Input]:
    """Checks the features of a batch and deals its examples to the requesters.

    Args:
      values: by feature name; features that `specs` does not name are not looked at.
      specs: by feature name.
      batch: examples.
      examples: per requester; the last ones may get fewer, or none.
      requesters: devices.

    Raises:
      ValueError: for missing features, other batch sizes or sequences that are too long.
      TypeError: for keys that are not integers.
    """
    missing = [name for name in specs if name not in values]
    if missing:
        raise ValueError(
            f"the batch lacks the features {missing}: the collection reads {list(specs)},"
            f" the batch has {list(values)}. Name them among `categorical=` or `bags=` of"
            " the source, or leave them out of the collection"
        )
    example_bounds = np.minimum(np.arange(requesters + 1) * examples, batch)
    inputs = {}
    for name, spec in specs.items():
        value = values[name]
        if isinstance(value, Jagged):
            inputs[name] = _jagged(name, spec, value, batch, example_bounds)
            continue
        keys = np.ascontiguousarray(as_keys(value, name))
        if keys.shape != (batch,):
            raise ValueError(
                f"feature {name!r} must have one key per example, shape ({batch},), got"
                f" {keys.shape}. Wrap several keys per example in shardjax.embed.Jagged"
            )
        if spec.combiner == "none" or spec.padding_id is not None or _drops(spec):
            value = Jagged(keys, np.ones(batch, np.int32))
            inputs[name] = _jagged(name, spec, value, batch, example_bounds)
        else:
            inputs[name] = Input(spec, keys, example_bounds, example_bounds)
    return inputs


def count_inputs(
    inputs: Mapping[str, Input], values: Mapping[str, np.ndarray | Jagged]
) -> dict[str, float]:
    """What a batch has, by the names of counters.

    Args:
      inputs: of `normalize`.
      values: that it was given.
    """
    return {
        "truncated": sum(x.truncated for x in inputs.values()),
        "padding_ids": sum(x.padding for x in inputs.values()),
        "ids": sum(len(x.keys) + x.padding for x in inputs.values()),
        "unused_ids": sum(
            len(x.values if isinstance(x, Jagged) else x)
            for name, x in values.items()
            if name not in inputs
        ),
    }


def _drops(spec: FeatureSpec) -> bool:
    return spec.on_bad_id == "drop"


def _jagged(name, spec, value: Jagged, batch: int, example_bounds) -> Input:
    if value.lengths.shape != (batch,):
        raise ValueError(
            f"feature {name!r} must have {batch} `lengths`, one per example, got"
            f" {len(value.lengths)}"
        )
    keys, lengths, weights = value.values, value.lengths, value.weights
    cut = padding = 0
    if spec.combiner == "none":
        if weights is not None:
            raise ValueError(
                f"feature {name!r} has combiner 'none' and cannot have weights: nothing is"
                " summed. Scale the sequence in the model instead"
            )
        longest = int(lengths.max()) if batch else 0
        limit = spec.max_length or longest
        if longest > limit and spec.padding_id is not None:
            # padding is nothing: it must not push keys out of a sequence
            kept = keys != np.uint64(spec.padding_id % 2**64)
            padding = len(keys) - int(kept.sum())
            examples = np.repeat(np.arange(batch), lengths)[kept]
            keys = keys[kept]
            lengths = np.bincount(examples, minlength=batch).astype(np.int32)
            longest = int(lengths.max())
        if longest > limit:
            if spec.on_long == "error":
                at = int(np.argmax(lengths))
                raise ValueError(
                    f"feature {name!r} has {longest} keys for example {at} and its"
                    f" `max_length` is {spec.max_length}. Enlarge it, or set `on_long` to"
                    " 'first' or 'last'"
                )
            kept, kept_lengths = np.empty_like(keys), np.empty_like(lengths)
            n = truncate(
                keys,
                lengths,
                limit,
                spec.on_long == "last",
                kept,
                kept_lengths,
            )
            cut = len(keys) - n
            keys, lengths = kept[:n], kept_lengths
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    bounds = offsets[example_bounds]
    keys = np.ascontiguousarray(keys)
    asked = (value.counts, value.scores) if isinstance(value, AskedKeys) else ()
    return Input(
        spec, keys, bounds, example_bounds, lengths, weights, cut, padding, *asked
    )

"""Batches on their way to the devices: planned, packed and sent in one transfer."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardjax.data.share import Part
from shardjax.embed import EmbeddingCollection, Index
from shardjax.embed.joint import JointBatch
from shardjax.embed.layout import Layout, pack
from shardjax.embed.plan import Plan
from shardjax.errands import Errand


@dataclass(frozen=True)
class PreparedBatch:
    """A batch on its way to the devices.

    Attributes:
      packed: int32 [devices, words] on the devices.
      layout: what the words are.
      plan: of the embeddings.
      size: examples in all processes, padding apart.
      counters: of the planner and of the data, by name, and with `planner_ms` how long
        planning took.
    """

    packed: jax.Array
    layout: Layout
    plan: Plan
    size: int
    counters: dict[str, float]


def check_prepared(batch: Any) -> None:
    """Refuses what no step can be called with.

    Raises:
      TypeError: if it has not been prepared.
    """
    if not isinstance(batch, PreparedBatch):
        raise TypeError(
            f"a step takes a prepared batch, got {type(batch).__name__}. Prepare it with"
            " `prepare(collection, batch, train=...)`, best as the `map` of a Loader"
        )


def prepare(
    collection: EmbeddingCollection,
    batch: Any,
    *,
    train: bool,
    groups: Index | None = None,
) -> PreparedBatch:
    """Plans a batch and sends it to the devices, in one transfer.

    Runs in the loader's thread; where there are several processes, in the main thread of
    each, with the examples of its own devices (`prepare_stream` is for a loader then).
    Training batches must be stepped on in the order in which they were prepared, each once.

    Args:
      collection: the tables.
      batch: a `shardjax.data.Batch`: labels, dense, features, optional weights/groups.
      train: whether unknown keys get a row.
      groups: numbers the batch's groups (users) for per-group metrics, in the order in
        which they are first seen; None leaves them out.

    Raises:
      PlanError, ValueError, TypeError: see `shardjax.embed.plan.Planner.plan`.
      TypeError: for several batches.
    """
    if not hasattr(batch, "labels"):
        raise TypeError(
            f"`prepare` takes one batch, got a {type(batch).__name__}. A Loader with"
            " `window=` gives lists of batches: let its `map` call `prepare_window`, or"
            " leave `window` out"
        )
    size = len(batch.labels)
    plan = collection.plan(_features(batch), size, _clicks(batch), train=train)
    return _send(collection, batch, plan, groups)


def prepare_window(
    collection: EmbeddingCollection, batches: Iterable[Any]
) -> Iterator[PreparedBatch]:
    """Plans training batches whose rows shall be on the devices together.

    Like `prepare` of one after the other, with the same result, but rows move between
    the devices and the storage only before the first of them. Give it to a
    `shardjax.data.Loader` as `map` with `window=` the number of batches.

    Args:
      collection: the tables.
      batches: as of `prepare`, to be trained on in this order.

    Returns:
      An iterator over one prepared batch for each. An error of a batch surfaces in its
      place.

    Raises:
      PlanError, ValueError, TypeError: see `shardjax.embed.plan.Planner.plan_window`.
      TypeError: for a single batch, at once.
    """
    if hasattr(batches, "labels"):
        raise TypeError(
            f"`prepare_window` takes a list of batches, got one {type(batches).__name__}."
            " Give the Loader `window=`, how many batches a list has, or let its `map` call"
            " `prepare`"
        )
    return _prepare_window(collection, list(batches), None)


def _prepare_window(
    collection: EmbeddingCollection, batches: list[Any], groups: Index | None
) -> Iterator[PreparedBatch]:
    plans = collection.plan_window(
        [(_features(b), len(b.labels), _clicks(b)) for b in batches]
    )
    for batch, plan in zip(batches, plans, strict=False):
        yield _send(collection, batch, plan, groups)


def _features(batch: Any) -> dict[str, Any]:
    features = dict(zip(batch.fixed_names, batch.fixed, strict=True))
    return features | batch.jagged


def _form(batch: Any, groups: Index | None) -> dict[str, Any]:
    """What of a batch its layout on the devices depends on, beside its features."""
    return {
        "number of dense features": batch.dense.shape[1],
        "shape of a label": list(batch.labels.shape[1:]),
        "column of groups": groups is not None and batch.groups is not None,
    }


def _clicks(batch: Any) -> np.ndarray:
    """The labels; 0 for examples without weight, whose label may be anything."""
    if batch.weights is None:
        return batch.labels
    return np.where(batch.weights == 0, 0, batch.labels)


class _Prepared:
    """Prepares windows that follow one another with the other processes.

    Its items are prepared batches, and errands of the thread that takes them.
    """

    def __init__(self, collection, windows, train, groups, check):
        self._collection, self._groups = collection, groups
        self._batches: deque[tuple[Any, int | None]] = deque()
        self._plans = collection.plan_stream(
            self._parts(windows, train, check), train=train
        )

    def _parts(self, windows, train: bool, check) -> Iterator[list[JointBatch]]:
        for window in windows:
            parts = []
            for batch in window:
                part, examples, dealt = _own_part(self._collection, batch, train)
                part = check(part)
                self._batches.append((part, dealt))
                clicks = _clicks(part)
                size = len(part.labels)
                parts.append(
                    JointBatch(
                        _features(part),
                        size,
                        examples,
                        clicks,
                        dealt,
                        form=_form(part, self._groups),
                    )
                )
            yield parts

    def __iter__(self) -> "_Prepared":
        return self

    def __next__(self) -> PreparedBatch | Errand:
        found = next(self._plans)
        if isinstance(found, Errand):
            return found
        part, dealt = self._batches.popleft()
        return _send(self._collection, part, found, self._groups, dealt)

    def abandon(self) -> None:
        """Nobody takes batches any more."""
        self._plans.abandon()


def _own_part(
    collection: EmbeddingCollection, batch: Any, train: bool
) -> tuple[Any, int, int | None]:
    """This process's examples of a batch of all, examples per device, and how many of them
    each gets before the next one, if that is fewer."""
    if isinstance(batch, Part):
        size = batch.examples * collection.devices
        examples = collection.examples_per_device(size, train=train)
        return batch.batch, examples, batch.dealt
    examples = collection.examples_per_device(len(batch.labels), train=train)
    span = collection.span
    start = min(span.first * examples, len(batch.labels))
    stop = min(start + span.count * examples, len(batch.labels))
    return batch.slice(start, stop), examples, None


def prepare_stream(
    collection: EmbeddingCollection,
    *,
    train: bool,
    groups: Index | None = None,
    check: Callable[[Any], Any] = lambda batch: batch,
) -> Callable[[Iterable[Sequence[Any]]], Iterator[PreparedBatch | Errand]]:
    """Makes what prepares batches ahead, in one process or several.

    Give it to a `shardjax.data.Loader` as `stream=`, with `window=` how many batches'
    rows shall be on the devices together. Where there are several processes, each prepares
    the examples of its own devices: the `Part` that a Loader with `share=` gives it, or its
    part of batches that all processes read.

    Args:
      collection: the tables.
      train, groups: as of `prepare`.
      check: called with each batch (of several processes: this one's part of it) first;
        returns what is to be prepared.

    Returns:
      A function of lists of batches. It gives a prepared batch for each, and where there
      are several processes an `Errand` before each list's.

    Example:
      >>> import shardjax as sj
      >>> from shardjax.data import Loader, Synthetic
      >>> data = Synthetic(rows=1000)
      >>> table = sj.embed.TableSpec("all", dim=4)
      >>> tables = sj.embed.EmbeddingCollection(
      ...     {name: sj.embed.FeatureSpec(table) for name in data.feature_names},
      ...     mesh=sj.make_mesh("1x1"))
      >>> loader = Loader(data, 400, stream=prepare_stream(tables, train=True), window=2)
      >>> [batch.size for batch in loader]
      [400, 400, 200]
    """

    def stream(windows):
        if collection.span.is_whole:
            return _alone(collection, windows, train, groups, check)
        return _Prepared(collection, windows, train, groups, check)

    return stream


def _alone(collection, windows, train, groups, check) -> Iterator[PreparedBatch]:
    for window in windows:
        if train:
            yield from _prepare_window(collection, list(map(check, window)), groups)
        else:
            for batch in window:
                yield prepare(collection, check(batch), train=False, groups=groups)


def _send(
    collection, batch, plan: Plan, groups: Index | None, dealt: int | None = None
) -> PreparedBatch:
    """Sends this process's part of a planned batch to its devices."""
    size = len(batch.labels)
    span, examples = collection.span, plan.examples
    each = examples if dealt is None else dealt

    def deal(x, dtype: type = np.float32):
        own = np.zeros((span.count * each, *x.shape[1:]), dtype)
        own[:size] = x
        own = own.reshape(span.count, each, *x.shape[1:])
        if each == examples:
            return own
        out = np.zeros((span.count, examples, *x.shape[1:]), dtype)
        out[:, :each] = own
        return out

    weights = np.ones(size, np.float32) if batch.weights is None else batch.weights
    arrays = {
        "labels": deal(batch.labels),
        "dense": deal(batch.dense),
        "weights": deal(weights),
        **plan.arrays,
    }
    if groups is not None and batch.groups is not None:
        arrays["groups"] = deal(groups.number(batch.groups), np.int32)
    packed, layout = pack(span.total, examples, plan.groups, arrays, span.count)
    sharding = jax.NamedSharding(collection.mesh, jax.P(collection.axes))
    counters = {"examples": size, **plan.counters}
    total = int(counters["examples"])
    counters["padding_examples"] = span.total * examples - total
    counters["bad_lines"] = batch.bad_lines
    counters["planner_ms"] = 1e3 * plan.seconds
    if span.is_whole:
        sent = jax.device_put(packed, sharding)
    else:
        shape = span.total, packed.shape[1]
        sent = jax.make_array_from_process_local_data(sharding, packed, shape)
    return PreparedBatch(sent, layout, plan, total, counters)

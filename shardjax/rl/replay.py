"""A replay in RAM: items by id, drawn uniformly, by priority or by rank.

**Ids.** The i-th item ever added has the id ``first_id + i``, 64 bits, and lies in slot
``id % capacity``. Next to each slot stands the id of its item. An id is thus answered for
by one comparison: if another item lies there by now, or none, it is *stale*. Whoever
computes priorities for a batch while others add items can report them whenever they are
ready; those of items that are gone are counted, returned as stale, and change nothing.

**Order.** Slots are filled in a ring: the oldest item leaves first. A deleted item leaves
its slot empty until the ring comes round to it.

**Probabilities** are those of the moment of the draw, and so are the weights. Nothing is
changed by a draw.

**Threads.** Each method takes the replay's lock: actors may add while a learner draws. The
kernels release the GIL.

Sizes: beside the items, 24 bytes for a slot; with priorities 9 more for the trees.
"""

import threading
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from shardjax.rl.arguments import as_ids, as_priorities, wrong_priority
from shardjax.rl.columns import Columns
from shardjax.rl.generator import generator_words, set_generator
from shardjax.rl.priorities import NO_ITEM, NORMS, Priorities, find_ids, spread, weigh
from shardjax.rl.rank import Order, rank_probabilities
from shardjax.rl.samplers import RankBased, Sampler, Uniform

_UNIFORM = Uniform()


class ReplayBatch(NamedTuple):
    """What `Replay.sample` draws; the first dims are [batch_size] or [groups, batch_size].

    Attributes:
      items: A pytree like the example, of arrays of its own.
      ids: uint64, which to report priorities for.
      probabilities: float64, with which each of the draws was to give this item.
      weights: float32, importance weights; 1 if items are drawn uniformly.
    """

    items: Any
    ids: np.ndarray
    probabilities: np.ndarray
    weights: np.ndarray


class Outcome(NamedTuple):
    """For which ids something was done.

    Attributes:
      applied: bool [n], the item was there.
      stale: bool [n], it was overwritten or deleted, or there never was one.
    """

    applied: np.ndarray
    stale: np.ndarray


class Replay:
    """Items of the past, of which batches are drawn.

    Args:
      example: A pytree of arrays, one item: the shapes and dtypes of all.
      capacity: Number of items; then the oldest is overwritten. Below 2**31.
      sampler: `Uniform()`, `Proportional(alpha, eps)` or `RankBased(alpha)`.
      weight_norm: What importance weights ``(N * P)**-beta`` are divided by: the largest of
        the "batch", the largest that any item of the "buffer" would have, or None.
      stratified: Draws one item from each of `batch_size` equally likely parts, in the
        order of the parts, which is that of slots or ranks. Each item's expected number of
        draws is the same, with less chance in it.
      first_id: The id of the first item.
      seed: Of the draws.

    Example:
      >>> from shardjax import rl
      >>> example = {"reward": np.float32(0)}
      >>> replay = rl.Replay(example, capacity=100, sampler=rl.Proportional(eps=0.0))
      >>> ids = replay.add({"reward": np.arange(3.0)}, priorities=[0.0, 0.0, 5.0])
      >>> batch = replay.sample(4, beta=0.4)
      >>> batch.items["reward"].tolist(), batch.ids.tolist()
      ([2.0, 2.0, 2.0, 2.0], [2, 2, 2, 2])
      >>> replay.set_priorities(batch.ids, np.zeros(4)).applied.all()
      np.True_
    """

    def __init__(
        self,
        example: Any,
        capacity: int,
        sampler: Sampler = _UNIFORM,
        *,
        weight_norm: Literal["batch", "buffer"] | None = "batch",
        stratified: bool = True,
        first_id: int = 0,
        seed: int = 0,
    ):
        if not 1 <= capacity < 2**31:
            raise ValueError(
                f"`capacity` must be from 1 to 2**31 - 1 items, got {capacity}."
            )
        if not isinstance(sampler, Sampler):
            raise TypeError(
                "`sampler` must be Uniform(), Proportional(...) or RankBased(...), got"
                f" {sampler!r}."
            )
        if weight_norm not in NORMS:
            raise ValueError(
                f'`weight_norm` must be "batch", "buffer" or None, got {weight_norm!r}.'
            )
        if not 0 <= first_id < NO_ITEM:
            raise ValueError(f"`first_id` must be from 0 to 2**64 - 2, got {first_id}.")
        self._columns = Columns(example, capacity)
        self._capacity = capacity
        self._sampler = sampler
        self._norm = NORMS[weight_norm]
        self._stratified = stratified
        self._next_id = int(first_id)
        self._slot_ids = self._columns.ids
        self._slot_ids.fill(NO_ITEM)
        self._order = Order(capacity)
        self._priorities = None
        if not isinstance(sampler, Uniform):
            self._priorities = Priorities(self._columns.priorities, sampler, self._norm)
        self._changes = 0  # since ranks were sorted
        self._counts = dict.fromkeys(
            ("inserted", "sampled", "deleted", "updated", "stale"), 0
        )
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def capacity(self) -> int:
        """The most items there can be."""
        return self._capacity

    def add(self, items: Any, priorities: Any = None) -> np.ndarray:
        """Adds items, over the oldest ones once all slots are taken.

        Args:
          items: A pytree like the example, of arrays [n, ...]. If there are more than
            `capacity`, the last of them stay.
          priorities: [n], finite and from 0 on; by default the largest there is, so that
            each item is soon drawn.

        Returns:
          The ids of the items, uint64 [n].

        Raises:
          ValueError: if items or priorities are not as said.
        """
        arrays, n = self._columns.check(items)
        with self._lock:
            first = self._next_id
            if first + n > int(NO_ITEM):
                raise OverflowError(
                    f"ids are below 2**64 - 1, and the next one is {first}: there are none"
                    f" for {n} more items. Start a new replay with a lower `first_id`."
                )
            ids = np.arange(n, dtype=np.uint64) + np.uint64(first)
            if priorities is not None:
                known = self._with_priorities("add")
                values = as_priorities(ids, priorities, "add")
                masses, wrong = known.weigh(values)
                if wrong >= 0:
                    raise wrong_priority(ids, values, wrong, "add")
            elif self._priorities is not None:
                values = np.full(n, self._priorities.largest() if len(self) else 1.0)
                masses, _ = self._priorities.weigh(values)
            kept = slice(max(0, n - self._capacity), n)
            slots = (ids[kept] % np.uint64(self._capacity)).astype(np.int64)
            if n:
                self._columns.write(int(slots[0]), [x[kept] for x in arrays])
            self._order.remove(slots)
            self._order.push(slots)
            self._slot_ids[slots] = ids[kept]
            if self._priorities is not None:
                self._write(slots, values[kept], masses[kept])
            self._next_id += n
            self._counts["inserted"] += n
        return ids

    def sample(
        self, batch_size: int, *, beta: float = 0.4, groups: int | None = None
    ) -> ReplayBatch:
        """Draws items with replacement.

        Args:
          batch_size: Number of items.
          beta: How much importance weights make up for the priorities: 0 not at all, 1
            wholly. The paper anneals it to 1.
          groups: Draws so many batches at once, each on its own: arrays are [groups,
            batch_size, ...], weights are normalised in each batch.

        Raises:
          RuntimeError: if there are no items.
        """
        if batch_size < 1 or (groups is not None and groups < 1):
            raise ValueError(
                "`batch_size` and `groups` must be at least 1, got"
                f" {batch_size} and {groups}."
            )
        if not 0 <= beta < np.inf:
            raise ValueError(f"`beta` must be a finite number from 0 on, got {beta}.")
        number = groups or 1
        shape = (batch_size,) if groups is None else (groups, batch_size)
        slots = np.empty(number * batch_size, np.int64)
        with self._lock:
            if not len(self):
                raise RuntimeError(
                    "The replay has no items to draw from: `add` some first, or ask"
                    " `len(replay)` before you draw."
                )
            points = self._rng.random((number, batch_size))
            spread(points, self._stratified)
            probabilities, weights = self._draw(points, slots, beta)
            items = self._columns.take(slots, shape)
            ids = self._slot_ids[slots]
            self._counts["sampled"] += len(slots)
        return ReplayBatch(
            items,
            ids.reshape(shape),
            probabilities.reshape(shape),
            weights.reshape(shape),
        )

    def _draw(self, points, slots, beta):
        """Writes slots for points [groups, n]; returns probabilities and weights."""
        size, flat = len(self), points.reshape(-1)
        if self._priorities is None:
            self._order.draw(flat, slots)
            return np.full(points.shape, 1 / size), np.ones(points.shape, np.float32)
        probabilities = np.empty(points.shape)
        least = 0.0
        if isinstance(self._sampler, RankBased):
            if self._changes >= (self._sampler.refresh or max(1, size // 4)):
                self._order.sort(self._priorities.raw)
                self._changes = 0
            alpha = self._sampler.alpha
            self._order.draw_ranks(flat, alpha, slots, probabilities.reshape(-1))
            if self._norm == NORMS["buffer"]:
                least = float(rank_probabilities(size, alpha)[-1])
        else:
            self._priorities.draw(self._order, flat, slots, probabilities.reshape(-1))
            if self._norm == NORMS["buffer"]:
                least = self._priorities.least(size)
        weights = np.empty(points.shape, np.float32)
        weigh(probabilities, size, least, float(beta), self._norm, weights)
        return probabilities, weights

    def set_priorities(self, ids: Any, priorities: Any) -> Outcome:
        """Gives items new priorities: the absolute TD errors, say, not weighted.

        Args:
          ids: uint64 [...]; of one given twice, the last counts.
          priorities: Finite and from 0 on, of the same shape.

        Returns:
          Which were set, and which ids are stale: nothing happens for those.

        Raises:
          ValueError: if a priority is NaN, infinite or negative (none is set then), or the
            sampler is `Uniform`.
        """
        ids = as_ids(ids)
        flat, method = ids.reshape(-1), "set_priorities"
        with self._lock:
            known = self._with_priorities(method)
            values = as_priorities(flat, np.reshape(priorities, -1), method)
            found = np.empty(flat.shape, np.bool_)
            wrong, count = known.report(self._slot_ids, flat, values, found)
            if wrong >= 0:
                raise wrong_priority(flat, values, wrong, method)
            self._changes += count
            self._counts["updated"] += count
            self._counts["stale"] += len(flat) - count
        return _outcome(found.reshape(ids.shape))

    def get(self, ids: Any) -> Any:
        """The items of ids, uint64 [...]: a pytree like the example, of copies.

        Raises:
          KeyError: if one is stale.
        """
        ids = as_ids(ids)
        with self._lock:
            slots, found, all_found = self._find(ids.reshape(-1))
            if not all_found:
                gone = ids.reshape(-1)[~found]
                raise KeyError(
                    f"{len(gone)} of {ids.size} ids are stale, the first is {gone[0]}: the"
                    " items were overwritten or deleted, or never added. `contains` says"
                    " which are there."
                )
            return self._columns.take(slots, ids.shape)

    def contains(self, ids: Any) -> np.ndarray:
        """Whether the items of ids, uint64 [...], are there, bool [...]."""
        ids = as_ids(ids)
        with self._lock:
            return self._find(ids.reshape(-1))[1].reshape(ids.shape)

    def replace(self, ids: Any, items: Any) -> Outcome:
        """Writes other items under ids, uint64 [n], which keep their priorities.

        Of an id given twice the last item counts; for a stale one nothing happens.
        """
        ids = as_ids(ids).reshape(-1)
        arrays, n = self._columns.check(items)
        if n != len(ids):
            raise ValueError(f"`items` must be as many as `ids`, {len(ids)}, got {n}.")
        with self._lock:
            slots, found, _ = self._find(ids)
            self._columns.put(slots[found], [x[found] for x in arrays])
        return _outcome(found)

    def delete(self, ids: Any) -> Outcome:
        """Deletes the items of ids, uint64 [n]: they are never drawn again."""
        ids = as_ids(ids).reshape(-1)
        with self._lock:
            slots, found, _ = self._find(ids)
            slots, before = slots[found], len(self)
            self._order.remove(slots)
            self._slot_ids[slots] = NO_ITEM
            if self._priorities is not None:
                self._write(slots, np.zeros(len(slots)), np.zeros(len(slots)))
            self._counts["deleted"] += before - len(self)
        return _outcome(found)

    def stats(self) -> dict[str, float]:
        """Counts since the beginning, and how things are.

        `size` items of `capacity`; how many were `inserted`, `sampled` (draws), `deleted`,
        `updated` (priorities set); `stale` priorities; `samples_per_insert`, the replay
        ratio; with priorities their largest, `max_priority`.
        """
        with self._lock:
            stats: dict[str, float] = {
                "size": len(self),
                "capacity": self._capacity,
                **self._counts,
            }
            stats["samples_per_insert"] = stats["sampled"] / max(1, stats["inserted"])
            if self._priorities is not None and len(self):
                stats["max_priority"] = self._priorities.largest()
            return stats

    def state_dict(self) -> dict[str, Any]:
        """All there is, as numpy arrays: items, ids, priorities, order, counts, generator.

        The items are not copied: their arrays are views of the replay. Write them out, or
        copy them, before the replay changes. `load_state_dict` copies.
        """
        with self._lock:
            order = self._order.slots()
            rows = int(order.max()) + 1 if len(order) else 0
            state = {
                "items": self._columns.tree(_views(self._columns.leaves, rows)),
                "ids": self._slot_ids[:rows].copy(),
                "order": order,
                "next_id": np.array(self._next_id, np.uint64),
                "capacity": np.array(self._capacity),
                "changes": np.array(self._changes),
                "counts": np.array(list(self._counts.values())),
                "generator": generator_words(self._rng),
            }
            if self._priorities is not None:
                state["priorities"] = self._priorities.raw[:rows].copy()
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Becomes as the replay was whose `state_dict` this is: its next draws are the same.

        Priorities are kept as they were given, so that the sampler may be another one, with
        another alpha: then the draws are as if the replay had had it all along.

        Raises:
          ValueError: if capacity or items are others, or there are no priorities.
        """
        if int(state["capacity"]) != self._capacity:
            raise ValueError(
                f"The state is of a replay of capacity {int(state['capacity'])}, and this"
                f" one has {self._capacity}: a slot is an id modulo the capacity. Make a"
                " replay of the same capacity, or `add` the items to this one."
            )
        if self._priorities is not None and "priorities" not in state:
            raise ValueError(
                "The state has no priorities: it is of a replay with the sampler Uniform()."
                " Load it into such a one, or `add` its items to this one."
            )
        leaves = self._columns.check_exactly(state["items"])
        order = np.asarray(state["order"], np.int32)
        rows = len(state["ids"])
        priorities, masses = np.zeros((2, self._capacity))
        if self._priorities is not None:
            priorities[:rows] = state["priorities"]
            masses[order], wrong = self._priorities.weigh(priorities[order])
            if wrong >= 0:
                gone = np.asarray(state["ids"])[order]
                raise wrong_priority(gone, priorities[order], wrong, "load_state_dict")
        with self._lock:
            for column, x in zip(self._columns.leaves, leaves, strict=True):
                column[: len(x)] = x
            self._slot_ids[:rows] = state["ids"]
            self._slot_ids[rows:] = NO_ITEM
            self._order.arrange(order)
            self._next_id = int(state["next_id"])
            self._changes = int(state["changes"])
            self._counts = dict(
                zip(self._counts, np.asarray(state["counts"]).tolist(), strict=True)
            )
            if self._priorities is not None:
                slots = np.arange(self._capacity, dtype=np.int64)
                self._priorities.write(slots, priorities, masses)
            set_generator(self._rng, state["generator"])

    def _find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """Slots of ids, which are there, and whether all are."""
        slots, found = np.empty(len(ids), np.int64), np.empty(len(ids), np.bool_)
        return slots, found, find_ids(self._slot_ids, ids, slots, found) == len(ids)

    def _write(self, slots, priorities, masses) -> None:
        assert self._priorities is not None
        self._priorities.write(slots, priorities, masses)
        self._changes += len(slots)

    def _with_priorities(self, method: str) -> Priorities:
        if self._priorities is None:
            raise ValueError(
                f"`{method}` got priorities, but the sampler is Uniform(), which has none."
                " Use Proportional(...) or RankBased(...)."
            )
        return self._priorities


def _views(columns: list[np.ndarray], rows: int) -> list[np.ndarray]:
    """The first rows of columns, not to be written to."""
    views = [column[:rows] for column in columns]
    for view in views:
        view.flags.writeable = False
    return views


def _outcome(applied: np.ndarray) -> Outcome:
    return Outcome(applied, ~applied)

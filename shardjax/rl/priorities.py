"""Priorities of slots: as given, as masses in a sum tree, the largest and the least."""

import numba
import numpy as np

from shardjax.rl.prefetch import prefetch
from shardjax.rl.rank import slot_at
from shardjax.rl.samplers import Proportional, RankBased
from shardjax.rl.sum_tree import add_up, allocate, descend, find_largest, lay_out

NO_ITEM = np.uint64(2**64 - 1)
# A sum of 2**31 of these is finite.
_LARGEST_MASS = 1e290
_AHEAD = 8
_NO_TREE = np.empty(0, np.float64)
_NO_WEIGHTS, _OF_BATCH, _OF_BUFFER = 0, 1, 2
NORMS = {None: _NO_WEIGHTS, "batch": _OF_BATCH, "buffer": _OF_BUFFER}


@numba.njit(inline="always")
def _mass_of(priority, alpha, eps):
    base = priority + eps
    return base if alpha == 1.0 else base**alpha


@numba.njit(nogil=True, cache=True)
def _write(largest, tree, least, offsets, slots, priorities, alpha, eps, keep_0):
    """Writes priorities of slots to all trees; a tree of no length is left out."""
    masses, negated = tree.shape[0] > 0, least.shape[0] > 0
    for i in range(slots.shape[0]):
        slot, priority = slots[i], priorities[i]
        largest[slot] = priority
        if masses:
            mass = 0.0 if priority < 0.0 else _mass_of(priority, alpha, eps)
            tree[slot] = mass
            if negated:
                exists = mass > 0.0 or (keep_0 and priority >= 0.0)
                least[slot] = -mass if exists else -np.inf
    find_largest(largest, offsets, slots)
    if masses:
        add_up(tree, offsets, slots)
        if negated:
            find_largest(least, offsets, slots)


@numba.njit(nogil=True, cache=True)
def _first_wrong(priorities, alpha, eps):
    for i in range(priorities.shape[0]):
        p = priorities[i]
        if not (p >= 0.0 and _mass_of(p, alpha, eps) <= _LARGEST_MASS) or p == np.inf:
            return i
    return -1


@numba.njit(nogil=True, cache=True)
def find_ids(slot_ids, ids, slots, found):
    """Writes the slot of each id, and whether the item is still there; returns how many."""
    capacity = np.uint64(slot_ids.shape[0])
    n = ids.shape[0]
    for i in range(n):
        slots[i] = np.int64(ids[i] % capacity)
        prefetch(slot_ids, slots[i])  # pyright: ignore[reportCallIssue]
    count = 0
    for i in range(n):
        found[i] = ids[i] != NO_ITEM and slot_ids[slots[i]] == ids[i]
        count += found[i]
    return count


@numba.njit(nogil=True, cache=True)
def _draw_masses(
    tree, offsets, order, ring, points, uniform_prob, slots, probabilities
):
    """Draws slots for points in [0, 1]; overwrites the points."""
    n, total = ring[1], tree[-1]
    rows = points.shape[0]
    flat = uniform_prob if total > 0.0 else 1.0
    if flat == 0.0:
        for j in range(rows):
            points[j] *= total
        descend(tree, offsets, points, slots)
    else:
        below = 0  # those drawn by mass come first here, then the others
        picked, rest = np.empty(rows, np.int64), np.empty(rows, np.float64)
        for j in range(rows):
            if points[j] < flat or flat == 1.0:
                rank = min(np.int64(points[j] / flat * n), n - 1)
                slots[j] = slot_at(order, ring, rank)
            else:
                picked[below] = j
                rest[below] = (points[j] - flat) / (1.0 - flat) * total
                below += 1
        leaves = np.empty(below, np.int64)
        if below:
            descend(tree, offsets, rest[:below], leaves)
        for i in range(below):
            slots[picked[i]] = leaves[i]
    scale = (1.0 - flat) / total if total > 0.0 else 0.0
    for j in range(rows):
        probabilities[j] = tree[slots[j]] * scale + flat / n


@numba.njit(nogil=True, cache=True)
def weigh(probabilities, size, least, beta, norm, weights):
    """Writes importance weights ``(size * P)**-beta``, divided as `norm` says.

    Args:
      probabilities: float64 [groups, n].
      size: Number of items.
      least: The least probability of an item, for ``_OF_BUFFER``.
      beta: The exponent.
      norm: One of `NORMS`.
      weights: float32 [groups, n], out.
    """
    for g in range(probabilities.shape[0]):
        reference = 1.0 / size
        if norm == _OF_BUFFER:
            reference = least
        elif norm == _OF_BATCH:
            reference = np.inf
            for j in range(probabilities.shape[1]):
                reference = min(reference, probabilities[g, j])
        for j in range(probabilities.shape[1]):
            weights[g, j] = (reference / probabilities[g, j]) ** beta


class Priorities:
    """Priorities of slots.

    Attributes:
      raw: float64 [capacity], as given; -inf for a slot without an item.
    """

    def __init__(self, capacity: int, sampler: Proportional | RankBased, norm: int):
        self._alpha = sampler.alpha
        self._eps = self._uniform_prob = 0.0
        self._offsets = lay_out(capacity)
        self._largest = allocate(self._offsets, -np.inf)
        self._tree = self._least = _NO_TREE
        if isinstance(sampler, Proportional):
            self._eps, self._uniform_prob = sampler.eps, sampler.uniform_prob
            self._tree = allocate(self._offsets, 0.0)
            if norm == _OF_BUFFER:
                self._least = allocate(self._offsets, -np.inf)
        self.raw = self._largest[:capacity]

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._tree[-1])

    @property
    def initial(self) -> float:
        """What a new item gets: the largest of all, 1 if there are none."""
        largest = float(self._largest[-1])
        return largest if largest >= 0 else 1.0

    def first_wrong(self, priorities: np.ndarray) -> int:
        """The first of priorities, float64 [n], that is not one; -1 if all are."""
        return _first_wrong(priorities, self._alpha, self._eps)

    def write(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Writes priorities, float64 [n], of slots; of one given twice the last.

        -inf says that a slot has no item any more.
        """
        _write(
            self._largest,
            self._tree,
            self._least,
            self._offsets,
            slots,
            priorities,
            self._alpha,
            self._eps,
            self._uniform_prob > 0,
        )

    def draw(self, order, points, slots, probabilities) -> None:
        """Draws slots in proportion to their masses.

        Args:
          order: An `Order` of the slots with items.
          points: float64 [n] in [0, 1]; overwritten.
          slots: int64 [n], out.
          probabilities: float64 [n], out.
        """
        _draw_masses(
            self._tree,
            self._offsets,
            order.order,
            order.ring,
            points,
            self._uniform_prob,
            slots,
            probabilities,
        )

    def least(self, size: int) -> float:
        """The least probability of any of `size` items that can be drawn."""
        if self.total == 0:
            return 1 / size
        share = -float(self._least[-1]) / self.total
        return (1 - self._uniform_prob) * share + self._uniform_prob / size

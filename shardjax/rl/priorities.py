"""Priorities of slots: as given, as masses in a sum tree, the largest and the least."""

import numba
import numpy as np

from shardjax.rl.prefetch import prefetch
from shardjax.rl.rank import slot_at
from shardjax.rl.samplers import Proportional, RankBased
from shardjax.rl.sum_tree import (
    WIDTH,
    add_up,
    allocate,
    climb,
    descend,
    lay_out,
    slot_of_largest,
)

NO_ITEM = np.uint64(2**64 - 1)
# A sum of 2**31 of these is finite.
_LARGEST_MASS = 1e290
_NO_WEIGHTS, _OF_BATCH, _OF_BUFFER = 0, 1, 2
NORMS = {None: _NO_WEIGHTS, "batch": _OF_BATCH, "buffer": _OF_BUFFER}


@numba.njit(nogil=True, cache=True)
def _write(raw, tree, largest, least, offsets, sums, slots, priorities, masses):
    """Writes priorities and masses of slots; `least` of no length is left out."""
    n = slots.shape[0]
    nodes = np.empty(n, np.int64)
    count = 0
    for i in range(n):
        slot = slots[i]
        before, above = tree[slot], largest[offsets[1] + slot // WIDTH]
        raw[slot], tree[slot] = priorities[i], masses[i]
        nodes[count] = slot
        count += masses[i] >= above or before == above
    climb(tree, largest, offsets, nodes[:count], False)
    if sums:
        add_up(tree, offsets, slots)
    if least.shape[0]:
        climb(tree, least, offsets, slots, True)


@numba.njit(nogil=True, cache=True)
def weigh_priorities(priorities, alpha, eps, masses):
    """Writes what priorities, float64 [n], weigh; returns the first that is none, or -1."""
    wrong = -1
    for i in range(priorities.shape[0] - 1, -1, -1):
        p = priorities[i]
        mass = p + eps
        if alpha != 1.0:
            mass = mass**alpha
        masses[i] = mass
        if not (p >= 0.0 and mass <= _LARGEST_MASS) or p == np.inf:
            wrong = i
    return wrong


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
def _report(
    slot_ids,
    ids,
    found,
    raw,
    tree,
    largest,
    least,
    offsets,
    sums,
    priorities,
    alpha,
    eps,
):
    """Writes priorities of the ids that are there, unless one of them is wrong."""
    n = ids.shape[0]
    masses, slots = np.empty(n, np.float64), np.empty(n, np.int64)
    wrong = weigh_priorities(priorities, alpha, eps, masses)
    if wrong >= 0:
        return wrong, 0
    count = find_ids(slot_ids, ids, slots, found)
    kept = 0
    for i in range(n):
        prefetch(raw, slots[i])  # pyright: ignore[reportCallIssue]
        prefetch(largest, offsets[1] + slots[i] // WIDTH)  # pyright: ignore[reportCallIssue]
        slots[kept], masses[kept] = slots[i], masses[i]
        priorities[kept] = priorities[i]
        kept += found[i]
    _write(
        raw,
        tree,
        largest,
        least,
        offsets,
        sums,
        slots[:count],
        priorities[:count],
        masses[:count],
    )
    return wrong, count


@numba.njit(nogil=True, cache=True)
def spread(points, stratified):
    """Puts point j of each row, float64 [rows, n] in [0, 1), into the j-th of n parts."""
    n = points.shape[1]
    if stratified:
        for g in range(points.shape[0]):
            for j in range(n):
                points[g, j] = (j + points[g, j]) / n


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
        below = 0  # those that are drawn by mass
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
      raw: float64 [capacity], as given; of a slot without an item, anything.
    """

    def __init__(self, raw: np.ndarray, sampler: Proportional | RankBased, norm: int):
        self.raw = raw
        self._offsets = lay_out(len(raw))
        self._tree = allocate(self._offsets)
        self._largest = allocate(self._offsets)
        self._least = np.empty(0, np.float64)
        # Ranks are of priorities as they are, and need no sums.
        self._alpha, self._eps, self._uniform_prob, self._sums = 1.0, 0.0, 0.0, False
        if isinstance(sampler, Proportional):
            self._alpha, self._eps, self._sums = sampler.alpha, sampler.eps, True
            self._uniform_prob = sampler.uniform_prob
            if norm == _OF_BUFFER:
                self._least = allocate(self._offsets)

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._tree[-1])

    def largest(self) -> float:
        """The priority of an item that no other outweighs; there is one."""
        return float(
            self.raw[slot_of_largest(self._tree, self._largest, self._offsets)]
        )

    def weigh(self, priorities: np.ndarray) -> tuple[np.ndarray, int]:
        """Masses of priorities, float64 [n]; and the first that is none, or -1."""
        masses = np.empty(priorities.shape, np.float64)
        wrong = weigh_priorities(priorities, self._alpha, self._eps, masses)
        return masses, wrong

    def report(self, slot_ids, ids, priorities, found) -> tuple[int, int]:
        """Writes priorities of ids, as `weigh` and `write`, unless one is wrong.

        Args:
          slot_ids: uint64 [capacity], the id of the item in each slot.
          ids: uint64 [n].
          priorities: float64 [n]; overwritten.
          found: bool [n], out: whether the item is there.

        Returns:
          The first that is not a priority, or -1; and how many were written.
        """
        return _report(
            slot_ids,
            ids,
            found,
            self.raw,
            self._tree,
            self._largest,
            self._least,
            self._offsets,
            self._sums,
            priorities,
            self._alpha,
            self._eps,
        )

    def write(self, slots, priorities, masses) -> None:
        """Writes priorities and their masses, float64 [n]; of a slot twice the last."""
        _write(
            self.raw,
            self._tree,
            self._largest,
            self._least,
            self._offsets,
            self._sums,
            slots,
            priorities,
            masses,
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
        mass = float(self._least[-1])
        if self._eps == 0 and self._uniform_prob > 0:
            mass = 0.0  # items of mass 0 are drawn too, should there be some
        share = mass / self.total
        return (1 - self._uniform_prob) * share + self._uniform_prob / size

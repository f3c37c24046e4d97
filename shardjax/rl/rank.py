"""Slots in an order from which they are drawn by rank, or uniformly.

The order is a ring, so that a new slot goes to the front at once. The last slot takes the
place of one that leaves. The slots with an item are thus always dense, ranks 1 to N, and
each draw hits one, whatever was deleted.

The law of ranks has the density ``x**-alpha`` on [1, N + 1), and rank r is all x whose
floor is r. With ``b = 1 - alpha``, its distribution function is ``(x**b - 1) / ((N +
1)**b - 1)``, or ``log(x) / log(N + 1)`` for b = 0; both it and its inverse are formulas.
They are computed by `expm1` and `log1p`, so that no digits are lost for large r or small b.
"""

import math

import numba
import numpy as np


@numba.njit(inline="always")
def mass_of_rank(rank, b, scale):
    """The probability of a rank from 1 on; `scale` is of `scale_of`."""
    step = math.log1p(1.0 / rank)
    if b == 0.0:
        return step / scale
    return math.exp(b * math.log(rank)) * math.expm1(b * step) / scale


@numba.njit(inline="always")
def scale_of(ranks, b):
    """What the probabilities of so many ranks are divided by."""
    length = math.log1p(np.float64(ranks))
    return length if b == 0.0 else math.expm1(b * length)


@numba.njit(inline="always")
def rank_at(u, ranks, b, scale):
    """The rank at which the distribution function reaches `u`, in [0, 1]."""
    x = math.exp(u * scale) if b == 0.0 else math.exp(math.log1p(u * scale) / b)
    return min(max(np.int64(x), np.int64(1)), np.int64(ranks))


@numba.njit(inline="always")
def slot_at(order, ring, rank):
    """The slot of a rank from 0 on."""
    i = ring[0] + rank
    return np.int64(order[i if i < order.shape[0] else i - order.shape[0]])


@numba.njit(nogil=True, cache=True)
def _push(order, place, ring, slots):
    for i in range(slots.shape[0]):
        head = ring[0] - 1 if ring[0] > 0 else order.shape[0] - 1
        order[head], place[slots[i]] = slots[i], head
        ring[0] = head
        ring[1] += 1


@numba.njit(nogil=True, cache=True)
def _remove(order, place, ring, slots):
    for i in range(slots.shape[0]):
        hole = place[slots[i]]
        if hole < 0:
            continue
        last = slot_at(order, ring, ring[1] - 1)
        order[hole], place[last] = last, hole
        place[slots[i]] = -1
        ring[1] -= 1


@numba.njit(nogil=True, cache=True)
def _draw_uniform(order, ring, points, slots):
    n = ring[1]
    for j in range(points.shape[0]):
        slots[j] = slot_at(order, ring, min(np.int64(points[j] * n), n - 1))


@numba.njit(nogil=True, cache=True)
def _draw_ranks(order, ring, points, alpha, slots, probabilities):
    n, b = ring[1], 1.0 - alpha
    scale = scale_of(n, b)
    for j in range(points.shape[0]):
        rank = rank_at(points[j], n, b, scale)
        slots[j] = slot_at(order, ring, rank - 1)
        probabilities[j] = mass_of_rank(rank, b, scale)


class Order:
    """The slots that have an item, each once, in an order.

    Attributes:
      order: int32 [capacity], the ring.
      place: int32 [capacity], where in it a slot is, or -1.
      ring: int64 [2], the first of the ring and how many.

    Example:
      >>> order = Order(4)
      >>> for slot in range(4): order.push(np.array([slot]))
      >>> order.remove(np.array([2]))
      >>> order.slots().tolist()
      [3, 0, 1]
    """

    def __init__(self, capacity: int):
        self.order = np.zeros(capacity, np.int32)
        self.place = np.full(capacity, -1, np.int32)
        self.ring = np.zeros(2, np.int64)

    def __len__(self) -> int:
        return int(self.ring[1])

    def slots(self) -> np.ndarray:
        """The slots by rank, int32 [n]."""
        n, head = len(self), int(self.ring[0])
        return np.concatenate([self.order[head : head + n], self.order[: head + n]])[:n]

    def push(self, slots: np.ndarray) -> None:
        """Puts slots, int64 [n], that have no rank before all others; the last is first."""
        _push(self.order, self.place, self.ring, slots)

    def remove(self, slots: np.ndarray) -> None:
        """Takes slots, int64 [n], out; one without a rank stays without."""
        _remove(self.order, self.place, self.ring, slots)

    def arrange(self, slots: np.ndarray) -> None:
        """Gives exactly these slots, int32 [n], the ranks from 1 on."""
        n = len(slots)
        self.order[:n] = slots
        self.place.fill(-1)
        self.place[slots] = np.arange(n, dtype=np.int32)
        self.ring[:] = 0, n

    def sort(self, priorities: np.ndarray) -> None:
        """Sorts by priorities, float64 [capacity], the highest first; equal ones stay."""
        slots = self.slots()
        self.arrange(slots[np.argsort(-priorities[slots], kind="stable")])

    def draw(self, points: np.ndarray, slots: np.ndarray) -> None:
        """Writes uniformly drawn `slots`, int64 [n], for points, float64 [n] in [0, 1]."""
        _draw_uniform(self.order, self.ring, points, slots)

    def draw_ranks(self, points, alpha: float, slots, probabilities) -> None:
        """As `draw`, by ranks; writes what the probability of each was, float64 [n]."""
        _draw_ranks(self.order, self.ring, points, alpha, slots, probabilities)


def rank_probabilities(ranks: int, alpha: float) -> np.ndarray:
    """Probabilities of the ranks 1 to `ranks`, float64 [ranks].

    Example:
      >>> rank_probabilities(3, alpha=0.0).round(3).tolist()
      [0.333, 0.333, 0.333]
      >>> rank_probabilities(3, alpha=1.0).round(3).tolist()  # log2, log4(3/2), log4(4/3)
      [0.5, 0.292, 0.208]
    """
    r, b = np.arange(1, ranks + 1, dtype=np.float64), 1.0 - alpha
    step, length = np.log1p(1 / r), math.log1p(ranks)
    if b == 0:
        return step / length
    return np.exp(b * np.log(r)) * np.expm1(b * step) / math.expm1(b * length)

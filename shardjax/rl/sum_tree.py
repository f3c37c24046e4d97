"""A tree of sums on the host: float64, 16 children to a node, in one flat array.

Leaves are padded to a multiple of 16, and so is each level above, up to the root::

    tree[offsets[0] : offsets[1]]   leaves: the mass of each slot, 0 for one without
    tree[offsets[l] + i]            the sum of tree[offsets[l - 1] + 16 i : ... + 16]
    tree[offsets[-1]]               the root

A parent is always the sum of its children computed afresh, never a sum to which a
difference was added: errors do not pile up, nothing is lost that a large mass once
swallowed, and writing twice the same is writing once. The nodes are thus a function of the
leaves alone, whatever happened before.

A batch goes down and up the tree level by level, so that the CPU has the nodes of one draw
on the way while it looks at those of the others. A node is two cache lines. The kernels
release the GIL.

Other trees may stand on the same leaves: `climb` keeps the largest, and the least above 0.
Of their arrays, laid out alike, the part for leaves is never touched, and takes no RAM.
"""

import numba
import numpy as np

from shardjax.rl.prefetch import prefetch

WIDTH = 16
_BITS = 4
_LINE = 8  # float64 in a cache line


def lay_out(leaves: int) -> np.ndarray:
    """Where the levels of a tree start, int64 [levels + 1]: its leaves first, the root last.

    >>> lay_out(17).tolist()  # 32 leaves, 2 nodes (padded to 16), the root
    [0, 32, 48]
    """
    offsets, nodes = [0], leaves
    while nodes > 1 or len(offsets) == 1:
        padded = -(-nodes // WIDTH) * WIDTH
        offsets.append(offsets[-1] + padded)
        nodes = padded // WIDTH
    return np.array(offsets, np.int64)


def allocate(offsets: np.ndarray) -> np.ndarray:
    """A tree of zeros, float64, its nodes on cache lines."""
    size = int(offsets[-1]) + 1
    room = np.zeros(size + _LINE, np.float64)
    start = -(room.ctypes.data // 8) % _LINE
    return room[start : start + size]


@numba.njit(inline="always")
def _at(t, i):
    """``t[i]``; as unsigned, `i` need not be looked at for being counted from the end."""
    return t[np.uint64(i)]


@numba.njit(inline="always")
def _sum_of(t, b):
    """The sum of 16 children, in an order that is good for vector units."""
    even = ((_at(t, b) + _at(t, b + 8)) + (_at(t, b + 4) + _at(t, b + 12))) + (
        (_at(t, b + 2) + _at(t, b + 10)) + (_at(t, b + 6) + _at(t, b + 14))
    )
    odd = ((_at(t, b + 1) + _at(t, b + 9)) + (_at(t, b + 5) + _at(t, b + 13))) + (
        (_at(t, b + 3) + _at(t, b + 11)) + (_at(t, b + 7) + _at(t, b + 15))
    )
    return even + odd


@numba.njit(inline="always")
def _extreme_of(t, b, least):
    """The largest of 16 children, or the least of those above 0; 0 if there is none."""
    extreme = _at(t, b)
    for c in range(1, WIDTH):
        value = _at(t, b + c)
        if least:
            better = value > 0.0 and (value < extreme or extreme == 0.0)
        else:
            better = value > extreme
        extreme = value if better else extreme
    return extreme


@numba.njit(inline="always")
def _parents(nodes, count):
    """Replaces nodes by their parents, one for neighbours of the same; returns how many."""
    kept, last = 0, np.int64(-1)
    for i in range(count):
        parent = nodes[i] >> _BITS
        if parent != last:
            nodes[kept] = parent
            kept += 1
            last = parent
    return kept


@numba.njit(nogil=True, cache=True)
def add_up(tree, offsets, slots):
    """Makes the sums above leaves that were written right again.

    Args:
      tree: float64 [n], as `allocate`.
      offsets: int64 [levels + 1], of `lay_out`.
      slots: int64 [n], the leaves; in any order, repeated or not.
    """
    nodes = slots.copy()
    count = nodes.shape[0]
    for level in range(1, offsets.shape[0]):
        count = _parents(nodes, count)
        below, here = offsets[level - 1], offsets[level]
        for i in range(count):
            node = here + nodes[i]
            tree[node] = _sum_of(tree, below + WIDTH * nodes[i])
            prefetch(tree, node ^ _LINE)  # pyright: ignore[reportCallIssue]


@numba.njit(nogil=True, cache=True)
def climb(tree, extremes, offsets, slots, least):
    """Makes the extremes above leaves that were written right again.

    It goes up only from nodes that change.

    Args:
      tree: float64 [n], as `allocate`; its leaves are from 0 on.
      extremes: float64 [n], the largest leaf below each node.
      offsets: int64 [levels + 1], of `lay_out`.
      slots: int64 [n], the leaves.
      least: Of `extremes`: the least that is above 0, instead of the largest.
    """
    nodes = slots.copy()
    count = nodes.shape[0]
    for level in range(1, offsets.shape[0]):
        count = _parents(nodes, count)
        children = tree if level == 1 else extremes
        below, here = offsets[level - 1], offsets[level]
        changed = 0
        for i in range(count):
            node = nodes[i]
            extreme = _extreme_of(children, below + WIDTH * node, least)
            if extreme != extremes[here + node]:
                extremes[here + node] = extreme
                nodes[changed] = node
                changed += 1
        count = changed


@numba.njit(nogil=True, cache=True)
def slot_of_largest(tree, largest, offsets):
    """The first leaf that is as large as the root of `largest`."""
    slot = 0
    for level in range(offsets.shape[0] - 2, -1, -1):
        children = tree if level == 0 else largest
        slot *= WIDTH
        while children[offsets[level] + slot] != largest[-1]:
            slot += 1
    return slot


@numba.njit(nogil=True, cache=True)
def descend(tree, offsets, points, slots):
    """Finds the leaves in which points of the cumulated masses lie.

    A leaf of mass 0 is never found, also where a point is rounded to the total: whoever is
    past the last child goes into the last one that has a mass.

    Args:
      tree: float64 [n], as `allocate`; its root is above 0.
      offsets: int64 [levels + 1], of `lay_out`.
      points: float64 [n], from 0 to the root; overwritten.
      slots: int64 [n], out: the leaves.
    """
    slots[:] = 0
    for level in range(offsets.shape[0] - 2, -1, -1):
        here = offsets[level]
        for j in range(points.shape[0]):
            base = here + WIDTH * slots[j]
            rest = points[j]
            child = 0
            mass = _at(tree, base)
            while rest >= mass and child < WIDTH - 1:
                rest -= mass
                child += 1
                mass = _at(tree, base + child)
            if rest >= mass:  # past the end, by rounding
                while mass == 0.0 and child > 0:
                    child -= 1
                    mass = _at(tree, base + child)
                rest = mass
            points[j] = rest
            slots[j] = WIDTH * slots[j] + child
            if level > 0:
                below = offsets[level - 1] + WIDTH * slots[j]
                prefetch(tree, below)  # pyright: ignore[reportCallIssue]
                prefetch(tree, below + _LINE)  # pyright: ignore[reportCallIssue]


class SumTree:
    """Masses of slots, and draws in proportion to them.

    Example:
      >>> tree = SumTree(3)
      >>> tree.set(np.array([0, 2]), np.array([1.0, 3.0]))
      >>> tree.total, tree.find(np.array([0.5, 1.5, 4.0])).tolist()
      (4.0, [0, 2, 2])
    """

    def __init__(self, capacity: int):
        self.offsets = lay_out(capacity)
        self.nodes = allocate(self.offsets)
        self.masses = self.nodes[:capacity]

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self.nodes[-1])

    def set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Writes masses, float64 [n], of slots, int64 [n]; of one given twice the last."""
        self.masses[slots] = masses
        add_up(self.nodes, self.offsets, slots)

    def find(self, points: np.ndarray) -> np.ndarray:
        """Slots, int64 [n], in which points, float64 [n] from 0 to `total`, lie."""
        slots = np.empty(points.shape, np.int64)
        descend(self.nodes, self.offsets, points.copy(), slots)
        return slots

    def rebuild(self) -> None:
        """Computes all sums from the masses, which were written directly."""
        add_up(self.nodes, self.offsets, np.arange(0, len(self.masses), WIDTH))

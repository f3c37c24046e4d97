"""Groups of parameters whose state is moved and updated at a time."""

from dataclasses import dataclass

import jax
import numpy as np

from shardjax.zero.offload import find_others, find_stacks
from shardjax.zero.plan import ZeroPlan


@dataclass(frozen=True)
class Group:
    """What is read, updated and written at a time.

    Attributes:
      members: places among the trained parameters.
      start, rows: which layers of them; None for whole parameters.
    """

    members: tuple[int, ...]
    start: int = 0
    rows: int | None = None

    def cut(self, x, start=None):
        """The group's part of a parameter or of an array like it."""
        if self.rows is None:
            return x
        if start is None:
            return x[self.start : self.start + self.rows]
        return jax.lax.dynamic_slice_in_dim(x, start, self.rows)

    def put(self, x: jax.Array, part: jax.Array, start) -> jax.Array:
        """The parameter with another part."""
        if self.rows is None:
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, start, 0)


def make_groups(plan: ZeroPlan, likes: list[list], most: int) -> list[Group]:
    """Groups of whole parameters and of layers of stacks.

    Args:
      plan: where all lies.
      likes: shapes of what is kept for each trained parameter.
      most: bytes of state in a group, if it is more than one layer or parameter.
    """
    sizes = [
        sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in kept) for kept in likes
    ]
    groups, members, size = [], [], 0
    for i in find_others(plan):
        if members and size + sizes[i] > most:
            groups.append(Group(tuple(members)))
            members, size = [], 0
        members.append(i)
        size += sizes[i]
    groups += [Group(tuple(members))] if members else []
    for layers, stack in find_stacks(plan).items():
        layer = max(sum(sizes[i] for i in stack) // layers, 1)
        rows = min(max(most // layer, 1), layers)
        groups += [
            Group(tuple(stack), start, min(rows, layers - start))
            for start in range(0, layers, rows)
        ]
    return groups

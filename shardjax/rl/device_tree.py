"""A tree of sums on a device: float32, `width` children to a node, an array per level.

``levels[0]`` holds the leaves, [nodes, width], zeros at its end; entry i of ``levels[l]``
is the sum of node i of ``levels[l - 1]``; the last level has one node, that of the total.

What makes float32 enough:

- A sum is always computed from the children, never by adding a difference. With
  differences, small masses are lost next to a large one that comes and goes, and leaves of
  no mass are drawn (flashbax #52).
- Children are added one after the other, in the sums and in the draws alike. Prefix sums
  so made never decrease, and stay as they are where a child is 0: the first one above a
  point belongs to a child that has a mass.
- Each level takes a fresh random number, times the last prefix sum of the node itself:
  the point is below it, so that there is no end to fall off. One number for all levels,
  with its 23 bits, would miss leaves of a large tree.

The functions are pure. Where the levels given to `set_leaves` are donated they are written
in place.
"""

import jax
import jax.numpy as jnp
from jax import Array

Levels = tuple[Array, ...]

WIDTH = 16


def init_levels(capacity: int, width: int = WIDTH) -> Levels:
    """A tree of zeros: float32 [nodes, width], the leaves first.

    Example:
      >>> [level.shape for level in init_levels(17, width=16)]
      [(2, 16), (1, 16)]
    """
    levels, entries = [], capacity
    while not levels or entries > 1:
        entries = -(-entries // width)
        levels.append(jnp.zeros((entries, width), jnp.float32))
    return tuple(levels)


def set_leaves(levels: Levels, slots: Array, masses: Array) -> Levels:
    """Writes leaves and the sums above them.

    Args:
      levels: Of `init_levels`.
      slots: int32 [n], each at most once; those past the last leaf are left out.
      masses: float32 [n], finite, from 0 on.

    Example:
      >>> levels = init_levels(3)
      >>> levels = set_leaves(levels, jnp.array([0, 2]), jnp.array([1.0, 3.0]))
      >>> float(total(levels))
      4.0
    """
    width, written, entries, values = levels[0].shape[1], [], slots, masses
    for level in levels:
        nodes, children = entries // width, entries % width
        level = level.at[nodes, children].set(values, mode="drop")
        values = _prefix_sums(level, nodes)[-1]
        written.append(level)
        entries = nodes
    return tuple(written)


def rebuild(leaves: Array) -> Levels:
    """The tree of these leaves, float32 [nodes, width], in time in proportion to them."""
    levels, width = [leaves], leaves.shape[1]
    while levels[-1].shape[0] > 1:
        sums = _prefix_sums(levels[-1], jnp.arange(levels[-1].shape[0]))[-1]
        padded = jnp.pad(sums, (0, -sums.shape[0] % width))
        levels.append(padded.reshape(-1, width))
    return tuple(levels)


def total(levels: Levels) -> Array:
    """The sum of all masses, float32 []."""
    return _prefix_sums(levels[-1], jnp.zeros(1, jnp.int32))[-1][0]


def sample_leaves(levels: Levels, points: Array) -> Array:
    """Draws leaves in proportion to their masses.

    A leaf of mass 0 is never drawn, unless all are: then the last one is.

    Args:
      levels: Of `init_levels`.
      points: float32 [levels, n] in [0, 1): random numbers for each level, the leaves'
        first.

    Returns:
      int32 [n].
    """
    width = levels[0].shape[1]
    entries = jnp.zeros(points.shape[1], jnp.int32)
    for level, u in zip(levels[::-1], points[::-1], strict=True):
        sums = _prefix_sums(level, entries)
        point = u * sums[-1]
        child = jnp.zeros_like(entries)
        for prefix in sums[:-1]:
            child += prefix <= point
        entries = width * entries + child
    return entries


def random_points(
    key: Array, levels: Levels, batch_size: int, *, stratified: bool
) -> Array:
    """Points for `sample_leaves`, float32 [levels, batch_size].

    Args:
      key: A key of `jax.random`.
      levels: Of `init_levels`.
      batch_size: Number of leaves to draw.
      stratified: At the top, takes a point from each of `batch_size` equal parts: so many
        draws come from each child of the top node as its mass says, but for one or two.
    """
    words = jax.random.bits(key, (2, batch_size), jnp.uint32)
    points = jnp.stack([_point(words, level) for level in range(len(levels))])
    if not stratified:
        return points
    part = jnp.arange(batch_size, dtype=jnp.float32)
    top = (part + points[-1]) / batch_size
    # Rounded up it could be 1; and 1 is not below the last prefix sum.
    return points.at[-1].set(jnp.minimum(top, 1 - 2**-23))


def _point(words: Array, level: int) -> Array:
    """A number in [0, 1) for a level, float32 [n], of 64 random bits, uint32 [2, n].

    Both words are mixed as murmur3 does (a bijection), each from another start per level:
    a third of the time that as many words of `jax.random` would take.
    """
    mixed = jnp.zeros((), jnp.uint32)
    for word, step in zip(words, (0x9E3779B9, 0x7F4A7C15), strict=True):
        word = word + jnp.uint32(step * (level + 1) % 2**32)
        word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
        word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
        mixed ^= word ^ (word >> 16)
    return (mixed >> 9).astype(jnp.float32) * jnp.float32(2**-23)


def _prefix_sums(level: Array, nodes: Array) -> list[Array]:
    """Prefix sums over the children of nodes, [n]: an array [n] for each child."""
    rows = level.at[nodes].get(mode="clip")
    sums = [rows[:, 0]]
    for c in range(1, level.shape[1]):
        sums.append(sums[-1] + rows[:, c])
    return sums

"""The device side of a step: unique rows to vectors, inside `jax.shard_map`.

Per device, with P devices::

    slab [slots, dim] --gather--> rows [rows, dim]          its unique rows of this batch
      --merge index--> [P, send, dim] --all_to_all--> [P * send, dim]   what it asked for
      --inverse index--> vectors per id --pool--> vectors per example

Everything after the first gather is one differentiable function of `rows`, so its
gradient is: sum per unique row of the requester, all_to_all back, sum per owner. Each
row's gradient arrives summed over all its uses, once, and no array as large as the table
exists. Where an index says "nothing here" it lies outside the array: gathers state
`mode="fill"` and read zeros, scatters state `mode="drop"`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardjax.embed.layout import GroupLayout, Layout


class Sequence(NamedTuple):
    """A feature with combiner `none`, padded to a common length."""

    values: jax.Array  # float [batch, length, dim], zeros where the mask is false
    mask: jax.Array  # bool [batch, length]


def gather_rows(slab: jax.Array, slots: jax.Array) -> jax.Array:
    """The rows at `slots`, int32 [n]; zeros for a slot outside the slab."""
    return slab.at[slots].get(mode="fill", fill_value=0, unique_indices=True)


def scatter_rows(slab: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """The slab with `rows` at `slots`; a slot outside the slab is skipped."""
    return slab.at[slots].set(rows, mode="drop", unique_indices=True)


def take_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """`rows[index]`, zeros for an index past the end; its gradient sums repeated uses."""
    return rows.at[index].get(mode="fill", fill_value=0)


def receive(rows: jax.Array, merge: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sends each requester the rows it asked for; returns what this device asked for.

    Args:
      rows: [rows, dim], this owner's unique rows.
      merge: int32 [devices, send], the row of each place, past the end for padding.
      axes: the mesh axes the devices lie on.

    Returns:
      [devices * send, dim], by owner and then place.
    """
    send = take_rows(rows, merge)
    received = jax.lax.all_to_all(send, axes, 0, 0)
    return received.reshape(-1, rows.shape[-1])


def pool(
    vectors: jax.Array,
    segments: jax.Array,
    weights: jax.Array | None,
    combiners: tuple[str, ...],
    examples: int,
) -> jax.Array:
    """Pools the vectors of each bag.

    Args:
      vectors: [values, dim], one per id.
      segments: int32 [values], bag of each id: feature * examples + example; past the
        last for padding.
      weights: float32 [values], or None for all one.
      combiners: of each feature.
      examples: per device.

    Returns:
      [features, examples, dim]. Zeros for an empty bag and for a zero divisor.
    """
    bags = len(combiners) * examples

    def total(x):
        return jax.ops.segment_sum(x, segments, bags, mode="drop")

    if weights is not None:
        vectors = vectors * weights[:, None].astype(vectors.dtype)
    sums = total(vectors).reshape(len(combiners), examples, -1)
    if all(c == "sum" for c in combiners):
        return sums
    ones = jnp.ones(segments.shape, jnp.float32) if weights is None else weights
    mean = total(ones).reshape(len(combiners), examples)
    squares = total(ones * ones).reshape(len(combiners), examples)
    divisors = jnp.stack(
        [
            mean[i]
            if c == "mean"
            else squares[i]
            if c == "sqrtn"
            else jnp.ones(examples)
            for i, c in enumerate(combiners)
        ]
    )
    # a zero divisor becomes one before it is used, so that its gradient stays finite
    nonzero = divisors != 0
    divisors = jnp.where(nonzero, divisors, 1)
    roots = jnp.array([c == "sqrtn" for c in combiners])[:, None]
    divisors = jnp.where(roots, jnp.sqrt(jnp.abs(divisors)), divisors)
    scale = jnp.where(nonzero, 1 / divisors, 0).astype(sums.dtype)
    return sums * scale[..., None]


@jax.custom_vjp
def _columns(x: jax.Array) -> tuple[jax.Array, ...]:
    """The columns of [examples, columns, dim]; the gradient is one stack, not a sum."""
    return tuple(x[:, i] for i in range(x.shape[1]))


def _columns_fwd(x):
    return _columns(x), None


def _columns_bwd(_, grads):
    return (jnp.stack(grads, axis=1),)


_columns.defvjp(_columns_fwd, _columns_bwd)


def embed_group(
    group: GroupLayout,
    layout: Layout,
    rows: jax.Array,
    arrays: dict[str, jax.Array],
    axes: tuple[str, ...],
) -> dict[str, jax.Array]:
    """The vectors of one group's features, in blocks; differentiable in `rows`.

    Args:
      group: the group's static half of the plan.
      layout: the whole plan's.
      rows: [rows, dim], this device's unique rows.
      arrays: the plan's arrays of this device, by field name.
      axes: the mesh axes of the devices.

    Returns:
      `<group>/fixed` [examples, features, dim], `<group>/pooled` likewise, and
      `<group>/sequence/<feature>` [examples, length, dim], as far as the group has them.
    """
    dim = rows.shape[-1]
    name = group.name
    if group.send:
        rows = receive(rows, arrays[f"{name}/merge"], axes)
    blocks = {}
    if group.fixed:
        vectors = take_rows(rows, arrays[f"{name}/fixed"])
        shape = (layout.examples, len(group.fixed), dim)
        blocks[f"{name}/fixed"] = vectors.reshape(shape)
    if group.pooled:
        pooled = pool(
            take_rows(rows, arrays[f"{name}/values"]),
            arrays[f"{name}/segments"],
            arrays[f"{name}/weights"] if group.weighted else None,
            tuple(c for _, c in group.pooled),
            layout.examples,
        )
        blocks[f"{name}/pooled"] = pooled.transpose(1, 0, 2)
    for s in group.sequences:
        index = arrays[f"{name}/sequence/{s.name}"]
        shape = (layout.examples, s.length, dim)
        blocks[f"{name}/sequence/{s.name}"] = take_rows(rows, index).reshape(shape)
    return blocks


def sequence_masks(
    layout: Layout, arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Per feature with combiner `none`, where it has ids: bool [examples, length]."""
    masks = {}
    for group in layout.groups:
        masked = group.received(layout.devices) + 1
        for s in group.sequences:
            index = arrays[f"{group.name}/sequence/{s.name}"]
            masks[s.name] = index.reshape(layout.examples, s.length) != masked
    return masks


def split_features(
    layout: Layout, blocks: dict[str, jax.Array], masks: dict[str, jax.Array]
) -> dict[str, jax.Array | Sequence]:
    """Blocks of vectors to vectors by feature, for any part of the examples."""
    out: dict[str, jax.Array | Sequence] = {}
    for group in layout.groups:
        name = group.name
        if group.fixed:
            out.update(zip(group.fixed, _columns(blocks[f"{name}/fixed"]), strict=True))
        if group.pooled:
            columns = _columns(blocks[f"{name}/pooled"])
            out.update(zip((f for f, _ in group.pooled), columns, strict=True))
        for s in group.sequences:
            out[s.name] = Sequence(blocks[f"{name}/sequence/{s.name}"], masks[s.name])
    return out

"""What devices send each other: parameters before a loss, gradients after it.

All functions take and give lists with an entry per parameter, in the order of the plan, and
all but `manual_specs` run inside `jax.shard_map`, which is manual over the plan's axes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardjax.partition import entry_axes
from shardjax.sharded import (
    Part,
    PartSpec,
    gather_part,
    over_auto_axes,
    scatter_sum,
    to_device,
)
from shardjax.zero.plan import ZeroPlan

Leaves = list[Any]


def manual_specs(plan: ZeroPlan) -> tuple[Leaves, Leaves]:
    """Specs of the parameters and of the gradients, over the axes that are manual.

    Gradients of what is not trained have None.
    """

    def manual(spec):
        return jax.P(
            *[e if set(entry_axes(e)) & set(plan.axes) else None for e in spec]
        )

    params = [manual(leaf.spec) for leaf in plan.leaves]
    grads = [manual(p.split_spec) if p.trained else None for p in plan.leaves]
    return params, grads


def params_for_loss(plan: ZeroPlan, params: Leaves) -> Leaves:
    """Parameters as a loss gets them: whole, or in parts where its layers gather them.

    Those that stream are still in the host's memory; others that lie there are brought.
    """

    def one(leaf, x):
        if leaf.streamed:
            whole = PartSpec(None, (), dtype=plan.precision.compute)
            return Part(x, leaf.part or whole)
        x = to_device(x) if leaf.on_host else x
        if leaf.part is None or plan.stage != 3:
            return x
        return Part(x, leaf.part) if leaf.in_block else gather_part(leaf.part, x)

    return [one(p, x) for p, x in zip(plan.leaves, params, strict=True)]


def trained_leaves(plan: ZeroPlan, params: Leaves) -> Leaves:
    """What is differentiated, on the devices; None for the rest."""

    def one(leaf, x):
        if leaf.streamed:
            return jnp.zeros(x.local.shape, x.local.dtype)
        return x if leaf.trained else None

    return [one(p, x) for p, x in zip(plan.leaves, params, strict=True)]


def in_compute_dtype(plan: ZeroPlan, trained: Leaves, params: Leaves) -> Leaves:
    """All parameters, those that are trained in the dtype to compute in."""
    compute = plan.precision.compute

    def one(leaf, t, x):
        if not leaf.trained:
            return x
        if leaf.streamed:
            return Part(x.local, x.spec, t)
        return t if isinstance(t, Part) or compute is None else t.astype(compute)

    return [one(*each) for each in zip(plan.leaves, trained, params, strict=True)]


def in_param_dtype(plan: ZeroPlan, grads: Leaves) -> Leaves:
    """Gradients to sum: those of parameters gathered in few bits come in as few."""
    return [
        g if g is None or isinstance(g, Part) else g.astype(leaf.dtype)
        for leaf, g in zip(plan.leaves, grads, strict=True)
    ]


def scatter_gradients(plan: ZeroPlan, grads: Leaves) -> Leaves:
    """Sums those gradients over the devices that the stage splits, and splits them."""

    def one(leaf, grad):
        if leaf.in_block:
            # summed and split by the transpose of its gather
            return grad.local if isinstance(grad, Part) else grad
        if grad is None or leaf.part is None or not plan.stage:
            return grad
        part = leaf.part
        grad = grad.astype(plan.precision.reduce or leaf.dtype)
        grad = scatter_sum(grad, part.dim, part.axes, part.auto, part.auto_axes)
        return grad.astype(leaf.dtype)

    return [one(p, g) for p, g in zip(plan.leaves, grads, strict=True)]


def sum_whole_gradients(plan: ZeroPlan, grads: Leaves) -> Leaves:
    """Sums the other gradients over the devices, in one collective."""
    whole = [
        i
        for i, (leaf, grad) in enumerate(zip(plan.leaves, grads, strict=True))
        if grad is not None and (leaf.part is None or not plan.stage)
    ]
    if not whole:
        return grads
    dtype = plan.precision.reduce

    def total(*values):
        return jax.lax.psum(values, plan.axes)

    specs = [plan.leaves[i].split_spec for i in whole]
    found = over_auto_axes(total, specs, plan.auto_axes)(
        *[grads[i].astype(dtype or grads[i].dtype) for i in whole]
    )
    grads = list(grads)
    for i, value in zip(whole, found, strict=True):
        grads[i] = value.astype(plan.leaves[i].dtype)
    return grads

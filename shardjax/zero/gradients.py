"""Gradients of any loss over a plan, with every collective written out.

They are taken inside `jax.shard_map` over the axes of data parallelism. What the compiler
would choose differs by backend (on a CPU it never scatters a sum); what is written here is
the same on all, and can be counted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardjax.partition import entry_axes
from shardjax.sharded import Part, gather_part, over_auto_axes, scatter_sum
from shardjax.zero.plan import LeafPlan, ZeroPlan

Loss = Callable[..., tuple[jax.Array, jax.Array]]


def make_gradients(
    loss: Loss, plan: ZeroPlan, *, microbatches: int = 1, seed: int | None = None
):
    """Makes `gradients(params, batch, step, scale) -> (loss, weight, grads)`.

    For loops of your own: inside jit, gradients are of the mean loss over the batch, None
    for what is not trained, split as the optimizer's state is (`apply_update` takes them).

    Args:
      loss, plan, microbatches, seed: as of `make_step`.
    """
    axes = plan.axes

    def local(params, batch, step, scale):
        given, whole = _for_loss(plan, params)
        index = jax.lax.axis_index(axes)

        def value_of(trained, batch, number):
            more = {}
            if seed is not None:
                key = jax.random.fold_in(jax.random.key(seed), step)
                key = jax.random.fold_in(key, number)
                more["key"] = jax.random.fold_in(key, index)
            full = plan.tree(
                _cast(plan, t) if leaf.trained else x
                for leaf, t, x in zip(plan.leaves, trained, whole, strict=True)
            )
            total, weight = _checked(loss(full, batch, **more))
            # scaled before the backward pass, in which small numbers get lost
            share = 1.0 if scale is None else scale / jnp.maximum(weight, 1.0)
            return total * share, (total, weight, share)

        def one(batch, number):
            grad_of = jax.grad(value_of, has_aux=True)
            grads, (total, weight, share) = grad_of(given, batch, number)
            grads = _in_dtype_of_params(plan, grads)
            if scale is not None:
                grads = jax.tree.map(lambda g: g / share, grads)
            if plan.stage == 2:
                grads = _reduce(plan, grads)
            return total, weight, grads

        total, weight, grads = _accumulate(one, batch, microbatches)
        total = jax.lax.psum(total, axes)
        weight = jax.lax.psum(weight, axes)
        if plan.stage != 2:
            grads = _reduce(plan, grads)
        mean = jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))
        grads = [None if g is None else g * mean.astype(g.dtype) for g in grads]
        return total * mean, weight, grads

    manual = set(plan.mesh.axis_names) - set(plan.auto_axes)
    specs = [_manual_spec(plan, leaf, leaf.spec) for leaf in plan.leaves]
    grad_specs = [
        _manual_spec(plan, leaf, leaf.split_spec) if leaf.trained else None
        for leaf in plan.leaves
    ]

    def gradients(params, batch, step, scale=None):
        _check_batch(plan, batch, microbatches)
        value, weight, grads = jax.shard_map(
            local,
            mesh=plan.mesh,
            axis_names=manual,
            in_specs=(specs, jax.P(axes), jax.P(), jax.P()),
            out_specs=(jax.P(), jax.P(), grad_specs),
            check_vma=False,
        )(jax.tree.leaves(params), batch, step, scale)
        return value, weight, plan.tree(grads)

    return gradients


def _for_loss(plan: ZeroPlan, params: list):
    """What is differentiated, per leaf (None for the rest), and all parameters."""
    given, whole = [], []
    for leaf, x in zip(plan.leaves, params, strict=True):
        if leaf.part is not None and plan.stage == 3:
            x = Part(x, leaf.part) if leaf.in_block else gather_part(leaf.part, x)
        given.append(x if leaf.trained else None)
        whole.append(x)
    return given, whole


def _cast(plan: ZeroPlan, x):
    compute = plan.precision.compute
    if isinstance(x, Part) or compute is None:
        return x
    return x.astype(compute)


def _in_dtype_of_params(plan: ZeroPlan, grads: list) -> list:
    """Gradients to sum: those of parameters gathered in few bits come in as few."""
    return [
        g if g is None or isinstance(g, Part) else g.astype(leaf.dtype)
        for leaf, g in zip(plan.leaves, grads, strict=True)
    ]


def _checked(result):
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            "the loss must return (loss_sum, weight), two numbers, got"
            f" {type(result).__name__}. Return the sum over the examples and the sum of"
            " their weights, such as (jnp.sum(losses), jnp.float32(losses.size))"
        )
    for name, x in zip(("loss_sum", "weight"), result, strict=True):
        if jnp.shape(x) != ():
            raise ValueError(
                f"the {name} that the loss returns must be one number, got shape"
                f" {jnp.shape(x)}. Sum it over the examples"
            )
    return tuple(jnp.asarray(x, jnp.float32) for x in result)


def _accumulate(one, batch, microbatches: int):
    """Sums of the results of `one` over microbatches."""
    if microbatches == 1:
        return one(batch, 0)

    def split(x):
        return x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])

    parts = jax.tree.map(split, batch)

    def body(sums, part):
        return jax.tree.map(jnp.add, sums, one(*part)), None

    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first, 0)
    )
    return jax.lax.scan(body, zeros, (parts, jnp.arange(microbatches)))[0]


def _reduce(plan: ZeroPlan, grads: list) -> list:
    """Sums gradients over the devices, and splits them from stage 1 on."""

    def one(leaf: LeafPlan, grad):
        if grad is None:
            return None
        if leaf.in_block:
            return grad.local  # summed and split by the transpose of its gather
        dtype = leaf.dtype
        grad = grad.astype(plan.precision.reduce or dtype)
        if leaf.part is not None and plan.stage:
            part = leaf.part
            grad = scatter_sum(grad, part.dim, part.axes, part.auto, part.auto_axes)
        else:
            auto = tuple(
                (d - len(leaf.shape), e)
                for d, e in enumerate(leaf.spec)
                if e is not None
            )
            whole = over_auto_axes(
                lambda g: jax.lax.psum(g, plan.axes), auto, plan.auto_axes, grad.ndim
            )
            grad = whole(grad)
        return grad.astype(dtype)

    return [one(leaf, g) for leaf, g in zip(plan.leaves, grads, strict=True)]


def _manual_spec(plan: ZeroPlan, leaf: LeafPlan, spec) -> jax.P:
    """A spec's entries over the axes that the gradients are manual over."""
    return jax.P(*[e if set(entry_axes(e)) & set(plan.axes) else None for e in spec])


def _check_batch(plan: ZeroPlan, batch, microbatches: int) -> None:
    pieces = plan.parts * microbatches
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        size = x.shape[0] if x.ndim else None
        if size is None or size % pieces:
            raise ValueError(
                "every leaf of the batch must have a leading dim of the examples that"
                f" {plan.parts} devices x {microbatches} microbatches divide, got shape"
                f" {x.shape} at {jax.tree_util.keystr(path) or 'the batch itself'}. Pad the"
                " batch with examples of weight 0"
            )

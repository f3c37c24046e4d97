"""Gradients of any loss over a plan, with every collective written out.

They are taken inside `jax.shard_map` over the axes of data parallelism. What the compiler
would choose differs by backend (on a CPU it never scatters a sum); what is written here is
the same on all, and can be counted.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.zero.exchange import (
    in_compute_dtype,
    in_param_dtype,
    manual_specs,
    params_for_loss,
    scatter_gradients,
    sum_whole_gradients,
    trained_leaves,
)
from shardjax.zero.offload import scale_gradients
from shardjax.zero.plan import ZeroPlan

Loss = Callable[..., tuple[Any, ...]]


def make_gradients(
    loss: Loss,
    plan: ZeroPlan,
    *,
    microbatches: int = 1,
    seed: int | None = None,
    has_aux: bool = False,
):
    """Makes `gradients(params, batch, step, scale) -> (loss, weight, grads)`.

    For loops of your own: inside jit, gradients are of the mean loss over the batch, None
    for what is not trained, split as the optimizer's state is (`apply_update` takes them).

    Args:
      loss, plan, microbatches, seed: as of `make_step`.
      has_aux: the loss returns a third value, a tree of arrays [examples, ...], which
        `gradients` returns as its fourth, of all examples in the order of the batch.
    """
    axes = plan.axes

    def local(params, batch, step, scale):
        params = params_for_loss(plan, params)
        index = jax.lax.axis_index(axes)

        def value_of(trained, batch, number):
            more = {}
            if seed is not None:
                key = jax.random.fold_in(jax.random.key(seed), step)
                key = jax.random.fold_in(key, number)
                more["key"] = jax.random.fold_in(key, index)
            full = plan.tree(in_compute_dtype(plan, trained, params))
            *sums, aux = _results(loss(full, batch, **more), has_aux)
            total, weight = sums
            # scaled before the backward pass, in which small numbers get lost
            share = 1.0 if scale is None else scale / jnp.maximum(weight, 1.0)
            return total * share, (total, weight, share, aux)

        def one(batch, number):
            grad_of = jax.grad(value_of, has_aux=True)
            given = trained_leaves(plan, params)
            grads, (total, weight, share, aux) = grad_of(given, batch, number)
            grads = in_param_dtype(plan, grads)
            if scale is not None:
                grads = jax.tree.map(lambda g: g / share, grads)
            if plan.stage == 2:
                grads = scatter_gradients(plan, grads)
            return (total, weight, grads), aux

        (total, weight, grads), aux = _accumulate(one, batch, microbatches)
        total = jax.lax.psum(total, axes)
        weight = jax.lax.psum(weight, axes)
        if plan.stage != 2:
            grads = scatter_gradients(plan, grads)
        grads = sum_whole_gradients(plan, grads)
        mean = jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))
        return total * mean, weight, scale_gradients(plan, grads, mean), aux

    manual = set(plan.mesh.axis_names) - set(plan.auto_axes)
    specs, grad_specs = manual_specs(plan)

    def gradients(params, batch, step, scale=None):
        check_batch(plan, batch, microbatches)
        value, weight, grads, aux = jax.shard_map(
            local,
            mesh=plan.mesh,
            axis_names=manual,
            in_specs=(specs, jax.P(axes), jax.P(), jax.P()),
            out_specs=(jax.P(), jax.P(), grad_specs, jax.P(axes)),
            check_vma=False,
        )(jax.tree.leaves(params), batch, step, scale)
        found = value, weight, plan.tree(grads)
        return (*found, aux) if has_aux else found

    return gradients


def _results(result, has_aux: bool):
    """The three results of a loss, None for the last of one without."""
    if not has_aux:
        return *checked_loss(result), None
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            "a loss with `has_aux` must return (loss_sum, weight, aux), two numbers and a"
            f" tree of arrays [examples, ...], got {type(result).__name__}"
        )
    return *checked_loss(result[:2]), result[2]


def checked_loss(result) -> tuple[jax.Array, ...]:
    """What a loss returned, as two float32 [].

    Raises:
      TypeError: if one is no number.
      ValueError: for anything else than (loss_sum, weight).
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            "the loss must return (loss_sum, weight), two numbers, got"
            f" {type(result).__name__}. Return the sum over the examples and the sum of"
            " their weights, such as (jnp.sum(losses), jnp.float32(losses.size))"
        )
    for name, x in zip(("loss_sum", "weight"), result, strict=True):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int):
            raise TypeError(
                f"the {name} that the loss returns must be a number, got"
                f" {type(x).__name__}. Return (loss_sum, weight)"
            )
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise TypeError(
                f"the {name} that the loss returns must be real, got"
                f" {jnp.result_type(x)}. Take its real part or its absolute value"
            )
        if jnp.shape(x) != ():
            raise ValueError(
                f"the {name} that the loss returns must be one number, got shape"
                f" {jnp.shape(x)}. Sum it over the examples"
            )
    return tuple(jnp.asarray(x, jnp.float32) for x in result)


def _accumulate(one, batch, microbatches: int):
    """Sums of the first result of `one` over microbatches; the second, of all examples."""
    if microbatches == 1:
        return one(batch, 0)

    def split(x):
        return x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])

    parts = jax.tree.map(split, batch)

    def body(sums, part):
        more, aux = one(*part)
        return jax.tree.map(jnp.add, sums, more), aux

    first = jax.tree.map(lambda x: x[0], parts)
    shapes, _ = jax.eval_shape(one, first, 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, aux = jax.lax.scan(body, zeros, (parts, jnp.arange(microbatches)))
    return sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)


def check_batch(plan: ZeroPlan, batch, microbatches: int) -> None:
    """Refuses a batch that devices and microbatches do not divide.

    Raises:
      ValueError: naming the leaf.
    """
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

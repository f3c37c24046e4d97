"""Training steps over a plan: gradients by hand, the optimizer by the compiler.

The optimizer runs outside of `jax.shard_map`, in the same jit as the gradients, on arrays
that the plan has split, so that what needs the whole of them (clipping by a global norm,
LAMB, Adafactor) needs no code of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardjax.precision import LossScale, all_finite, init_scale, next_scale
from shardjax.zero.gradients import Loss, make_gradients
from shardjax.zero.opt_state import trained_only
from shardjax.zero.plan import LeafPlan, ZeroPlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ZeroState:
    """What a step changes. Donated to the step: keep no old one."""

    step: jax.Array  # int32 [], steps taken; on all devices
    params: Any  # as the plan's param_specs say
    opt_state: Any  # optax state, as the plan's opt_specs say
    loss_scale: LossScale | None  # of float16 losses; on all devices

    def replace(self, **changes) -> "ZeroState":
        """A copy with other values for some fields."""
        return replace(self, **changes)


def state_shardings(plan: ZeroPlan) -> ZeroState:
    """A NamedSharding per leaf of the state."""

    def bind(specs):
        return jax.tree.map(
            lambda spec: jax.NamedSharding(plan.mesh, spec),
            specs,
            is_leaf=lambda x: isinstance(x, jax.P),
        )

    everywhere: Any = jax.NamedSharding(plan.mesh, jax.P())
    scale = jax.eval_shape(lambda: init_scale(plan.precision.scaling))
    return ZeroState(
        everywhere,
        bind(plan.param_specs),
        bind(plan.opt_specs),
        jax.tree.map(lambda _: everywhere, scale),
    )


def abstract_state(plan: ZeroPlan) -> ZeroState:
    """Shapes, dtypes and shardings of the state, to compile a step for without any data.

    Example:
      >>> import numpy as np, shardjax as sj
      >>> from shardjax import zero
      >>> params, tx = {"w": np.ones((8, 2), np.float32)}, optax.adam(1e-3)
      >>> plan = zero.plan_zero(params, tx, sj.make_mesh("1x1"), 2)
      >>> zero.abstract_state(plan).params["w"].shape
      (8, 2)
    """
    params = plan.tree(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in plan.leaves)
    scale = jax.eval_shape(lambda: init_scale(plan.precision.scaling))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = ZeroState(step, params, plan.abstract_opt_state, scale)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        state_shardings(plan),
    )


def init_state(
    params: PyTree, tx: optax.GradientTransformation, plan: ZeroPlan
) -> ZeroState:
    """The state before the first step.

    Args:
      params: the parameters, as planned for, or a function without arguments that makes
        them, which then exist only in parts.
      tx: the optimizer of the plan.
      plan: where all lies.

    Returns:
      A state of copies: the step donates it, never the arrays given.

    Raises:
      ValueError: if the parameters are not those of the plan.
    """
    make = params if callable(params) else None
    abstract = jax.eval_shape(make) if make else params
    _check_params(plan, abstract)

    def init(params):
        params = make() if make else jax.tree.map(jnp.copy, params)
        return ZeroState(
            jnp.zeros([], jnp.int32),
            params,
            tx.init(trained_only(plan.leaves, params)),
            init_scale(plan.precision.scaling),
        )

    jitted = jax.jit(init, out_shardings=state_shardings(plan))
    return jitted(None if make else params)


def _check_params(plan: ZeroPlan, params) -> None:
    if jax.tree.structure(params) != plan.treedef:
        raise ValueError(
            "`params` must have the structure that was planned for,"
            f" {plan.treedef}, got {jax.tree.structure(params)}"
        )
    for leaf, x in zip(plan.leaves, jax.tree.leaves(params), strict=True):
        if (tuple(x.shape), x.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"{leaf.path} was planned as {leaf.dtype}{list(leaf.shape)}, got"
                f" {x.dtype}{list(x.shape)}. Plan with these parameters"
            )


def make_step(
    loss: Loss,
    tx: optax.GradientTransformation,
    plan: ZeroPlan,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    seed: int | None = None,
) -> Callable[[ZeroState, PyTree], tuple[ZeroState, dict[str, jax.Array]]]:
    """Makes the training step of a loss.

    The step minimises sum(loss_sum) / sum(weight) over all microbatches and devices: right
    also where microbatches differ in weight. Where all weight is zero, gradients are.

    Args:
      loss: `loss(params, batch) -> (loss_sum, weight)`, float32 [] both, of a device's
        part of a microbatch. With a `seed` it is called with `key=`, a PRNG key of its own
        for each step, microbatch and device. Parameters of the plan's `blocks` come in
        parts at stage 3: the loss calls `shardjax.gather` in each layer.
      tx: the optimizer of the plan.
      plan: where all lies.
      microbatches: parts of the batch that go through the loss one after the other.
      clip_norm: gradients are scaled down to this global norm, if theirs is larger.
      seed: of the keys, None for a loss without.

    Returns:
      `step(state, batch) -> (state, info)`. `state` is donated. `batch` is a tree of arrays
      [examples, ...], whose examples are split over the plan's axes. `info` are float32
      [] on the devices: loss, weight, grad_norm (before clipping) and, where the loss is
      scaled, loss_scale and skipped, the number of steps that were so far.

    Raises:
      ValueError: for a number of microbatches or a norm that is not positive, here; for a
        batch that does not divide, or a loss that returns something else, at the first
        step.
    """
    if microbatches < 1 or isinstance(microbatches, bool):
        raise ValueError(f"`microbatches` must be positive, got {microbatches}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"`clip_norm` must be positive or None, got {clip_norm}")
    gradients = make_gradients(loss, plan, microbatches=microbatches, seed=seed)
    scaling = plan.precision.scaling

    @partial(jax.jit, donate_argnums=0, out_shardings=(state_shardings(plan), None))
    def step(state: ZeroState, batch):
        scale = state.loss_scale.scale if state.loss_scale else None
        value, weight, grads = gradients(state.params, batch, state.step, scale)
        norm = optax.tree.norm(grads)
        info = {"loss": value, "weight": weight, "grad_norm": norm}
        if clip_norm is not None:
            shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * shrink.astype(g.dtype), grads)
        params, opt_state = apply_update(plan, tx, grads, state.opt_state, state.params)
        new = ZeroState(state.step + 1, params, opt_state, state.loss_scale)
        if scaling is not None and state.loss_scale is not None:
            finite = all_finite(grads)
            new = jax.tree.map(partial(jnp.where, finite), new, state)
            new = new.replace(
                step=state.step + 1,
                loss_scale=next_scale(scaling, state.loss_scale, finite),
            )
            info |= {"loss_scale": scale, "skipped": new.loss_scale.skipped}
        return new, info

    return step


def apply_update(
    plan: ZeroPlan,
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
) -> tuple[PyTree, PyTree]:
    """Moves parameters by their gradients, each device those parts that the plan gives it.

    Inside jit, outside of shard_map.

    Args:
      plan, tx: where all lies, and the optimizer.
      grads: of the trained parameters, None for others, split as the plan says.
      opt_state: of the optimizer.
      params: between steps.

    Returns:
      The new parameters and state of the optimizer.
    """
    split = constrain(plan, params)
    mine = trained_only(plan.leaves, split)
    updates, opt_state = tx.update(grads, opt_state, mine)
    moved = optax.apply_updates(mine, updates)
    flat = plan.treedef.flatten_up_to(moved)
    old = jax.tree.leaves(split)
    new = plan.tree(
        m if leaf.trained else x
        for leaf, m, x in zip(plan.leaves, flat, old, strict=True)
    )
    return constrain(plan, new), opt_state


def constrain(plan: ZeroPlan, params: PyTree) -> PyTree:
    """Parameters, each device with the parts that it updates."""

    def one(leaf: LeafPlan, x):
        if not leaf.trained:
            return x
        sharding = jax.NamedSharding(plan.mesh, leaf.split_spec)
        return jax.lax.with_sharding_constraint(x, sharding)

    return plan.tree(map(one, plan.leaves, jax.tree.leaves(params)))

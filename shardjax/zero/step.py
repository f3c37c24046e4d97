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

from shardjax.precision import LossScale, all_finite, choose, init_scale, next_scale
from shardjax.sharded import to_host
from shardjax.zero.checks import StateCheck, check_optimizer
from shardjax.zero.gradients import Loss, make_gradients
from shardjax.zero.guarded import guarded_step
from shardjax.zero.offload import init_on_host, scale_gradients, update_on_host
from shardjax.zero.opt_state import trained_only
from shardjax.zero.plan import ZeroPlan


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

    def on_host(tree):
        return jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), tree)

    everywhere: Any = jax.NamedSharding(plan.mesh, jax.P())
    scale = jax.eval_shape(lambda: init_scale(plan.precision.scaling))
    opt_state = bind(plan.opt_specs)
    if plan.offloaded:
        kept, shared = plan.offloaded.split(opt_state)
        opt_state = plan.offloaded.join(on_host(kept), shared)
    params = zip(plan.leaves, jax.tree.leaves(bind(plan.param_specs)), strict=True)
    return ZeroState(
        everywhere,
        plan.tree(on_host(s) if leaf.on_host else s for leaf, s in params),
        opt_state,
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
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
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
      ValueError: if the parameters or the optimizer are not those of the plan.
    """
    check_optimizer(plan, tx)
    make = params if callable(params) else None
    abstract = jax.eval_shape(make or (lambda: params))
    _check_params(plan, abstract)

    def init(params):
        params = make() if make else jax.tree.map(jnp.copy, params)
        params = plan.tree(
            to_host(x) if leaf.on_host else x
            for leaf, x in zip(plan.leaves, jax.tree.leaves(params), strict=True)
        )
        return ZeroState(
            jnp.zeros([], jnp.int32),
            params,
            _init_opt_state(plan, tx, trained_only(plan.leaves, params)),
            init_scale(plan.precision.scaling),
        )

    jitted = jax.jit(init, out_shardings=state_shardings(plan))
    return jitted(None if make else params)


def place_state(state: ZeroState, plan: ZeroPlan) -> ZeroState:
    """Puts a state where a plan says, such as one made for another plan.

    What lies there already is not copied: it is the same array, to be donated once.

    Args:
      state: with the parameters and the optimizer of the plan, wherever it lies.
      plan: where all is to lie.

    Example:
      >>> import numpy as np, shardjax as sj
      >>> from shardjax import zero
      >>> params, tx, mesh = {"w": np.ones((8, 2))}, optax.adam(1e-3), sj.make_mesh("1x1")
      >>> state = zero.init_state(params, tx, zero.plan_zero(params, tx, mesh, 2))
      >>> plan = zero.plan_zero(params, tx, mesh, 2, offload="opt_state")
      >>> moved = zero.place_state(state, plan)
      >>> moved.opt_state[0].mu["w"].sharding.memory_kind
      'pinned_host'
      >>> moved.params["w"] is state.params["w"]
      True
    """

    def place(x, sharding):
        there = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(
            sharding, x.ndim
        )
        return x if there else jax.device_put(x, sharding)

    return jax.tree.map(place, state, state_shardings(plan))


def _init_opt_state(plan: ZeroPlan, tx, params: PyTree) -> PyTree:
    if not plan.offloaded:
        return tx.init(params)
    return init_on_host(plan, plan.offloaded, jax.tree.leaves(params))


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
      scaled, loss_scale and skipped, the number of steps that were so far. A call waits
      until all steps but the last two are done. `step.jitted` is the jitted function, for
      `lower`; it checks no state and waits for nothing.

    Raises:
      ValueError: for another optimizer than the plan's, a number of microbatches or a norm
        that is not positive, here; for a batch that does not divide, or a loss that returns
        something else, at the first step; for a state that was given to a step before, has
        an array twice, or lies otherwise than planned, at each.
    """
    check_optimizer(plan, tx)
    gradients = make_clipped_gradients(
        loss, plan, microbatches=microbatches, clip_norm=clip_norm, seed=seed
    )

    @partial(jax.jit, donate_argnums=0, out_shardings=(state_shardings(plan), None))
    def run(state: ZeroState, batch):
        grads, info, finite = gradients(state, batch)
        params, opt_state = apply_update(
            plan, tx, grads, state.opt_state, state.params, finite
        )
        scale = scale_after(plan, state.loss_scale, finite)
        return ZeroState(state.step + 1, params, opt_state, scale), info

    wanted = abstract_state(plan)
    return guarded_step(
        run, StateCheck({"params": wanted.params, "opt_state": wanted.opt_state})
    )


def make_clipped_gradients(
    loss: Loss,
    plan: ZeroPlan,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    seed: int | None = None,
    has_aux: bool = False,
):
    """Makes `gradients(state, batch) -> (grads, info, finite)`, all of a step but its end.

    Args:
      loss, plan, microbatches, clip_norm, seed: as of `make_step`.
      has_aux: as of `make_gradients`; what the loss returns besides is `info["aux"]`.

    Returns:
      A function to call inside jit. Its results are what `apply_update` takes, what a step
      tells, and a bool [], None where the loss is not scaled.
    """
    if microbatches < 1 or isinstance(microbatches, bool):
        raise ValueError(f"`microbatches` must be positive, got {microbatches}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"`clip_norm` must be positive or None, got {clip_norm}")
    gradients = make_gradients(
        loss, plan, microbatches=microbatches, seed=seed, has_aux=has_aux
    )

    def clipped(state: ZeroState, batch):
        scale = state.loss_scale
        value, weight, grads, *aux = gradients(
            state.params, batch, state.step, scale.scale if scale else None
        )
        norm = _norm(grads)
        info = {"loss": value, "weight": weight, "grad_norm": norm}
        if has_aux:
            info["aux"] = aux[0]
        if clip_norm is not None:
            shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
            each = plan.treedef.flatten_up_to(grads)
            grads = plan.tree(scale_gradients(plan, each, shrink))
        if scale is None:
            return grads, info, None
        finite = all_finite(grads)
        skipped = scale.skipped + jnp.where(finite, 0, 1)
        return grads, info | {"loss_scale": scale.scale, "skipped": skipped}, finite

    return clipped


def _norm(grads: PyTree) -> jax.Array:
    """The global norm, summed in float32 or wider: squares overflow float16 early."""

    def squares(x):
        return jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))

    return jnp.sqrt(sum(map(squares, jax.tree.leaves(grads)), jnp.float32(0)))


def scale_after(plan: ZeroPlan, scale: LossScale | None, finite: jax.Array | None):
    """The scale of the loss after a step; None where it is not scaled."""
    if plan.precision.scaling is None or scale is None or finite is None:
        return None
    return next_scale(plan.precision.scaling, scale, finite)


def apply_update(
    plan: ZeroPlan,
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    finite: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Moves parameters by their gradients, each device those parts that the plan gives it.

    Inside jit, outside of shard_map.

    Args:
      plan, tx: where all lies, and the optimizer.
      grads: of the trained parameters, None for others, split as the plan says.
      opt_state: of the optimizer.
      params: between steps.
      finite: bool [], False to leave everything as it is; None for True.

    Returns:
      The new parameters and state of the optimizer, where they lie between steps.
    """
    split = _place(plan, params, [leaf.split_spec for leaf in plan.leaves])
    mine = trained_only(plan.leaves, split)
    if plan.offloaded:
        flat = [jax.tree.leaves(tree) for tree in (grads, mine)]
        moved, opt_state = update_on_host(
            plan, plan.offloaded, flat[0], opt_state, flat[1], finite
        )
    else:
        updates, new_state = tx.update(grads, opt_state, mine)
        moved = jax.tree.leaves(optax.apply_updates(mine, updates))
        old = jax.tree.leaves(mine), opt_state
        moved, opt_state = choose(finite, (moved, new_state), old)
    trained = iter(moved)
    new = plan.tree(
        next(trained) if leaf.trained else x
        for leaf, x in zip(plan.leaves, jax.tree.leaves(split), strict=True)
    )
    split = _place(plan, new, [leaf.split_spec for leaf in plan.leaves])
    params = _place(plan, split, [leaf.spec for leaf in plan.leaves])
    return params, jax.tree.map(partial(_constrain, plan), opt_state, plan.opt_specs)


def _place(plan: ZeroPlan, params: PyTree, specs) -> PyTree:
    """Parameters as these specs say; what is not trained as it is."""
    return plan.tree(
        _constrain(plan, x, spec) if leaf.trained else x
        for leaf, x, spec in zip(
            plan.leaves, jax.tree.leaves(params), specs, strict=True
        )
    )


def _constrain(plan: ZeroPlan, x, spec):
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(plan.mesh, spec))

"""Deep Q-learning over a plan of `shardjax.zero`.

A learner's update, of items of a replay (Mnih et al. 2015; van Hasselt et al. 2016 for
`double`; Schaul et al. 2016 for the weights)::

    a_t  = argmax_a q(params, obs_t)             double; else argmax_a q(target, obs_t)
    td   = r_t + discount_t * q(target, obs_t)[a_t] - q(params, obs_tm1)[a_tm1]
    loss = mean(weights * huber(td))

An item says itself what comes after it: `r_t` is the sum of the m discounted rewards until
`obs_t`, and `discount_t` is gamma ** m, or 0 where the episode has terminated. A truncated
episode has the discount of any other step, and as `obs_t` what was seen last, not what the
next episode begins with. So n-step returns and the ends of episodes are settled when items
are made, and nothing is left of them here.

The state is a pytree of which every leaf lies where the plan says: parameters, optimizer
state and target in parts or whole, at all stages of ZeRO. Dueling (Wang et al. 2016) is a
matter of the network: see `shardjax.models.QNetwork`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from shardjax.precision import LossScale
from shardjax.rl.target import (
    TargetRule,
    apply_target,
    as_params,
    check_rule,
    init_target,
    target_dtype,
)
from shardjax.zero import (
    ZeroPlan,
    ZeroState,
    abstract_state,
    apply_update,
    init_state,
)
from shardjax.zero.checks import StateCheck, check_optimizer
from shardjax.zero.exchange import in_compute_dtype, manual_specs, params_for_loss
from shardjax.zero.guarded import guarded_step
from shardjax.zero.step import make_clipped_gradients, scale_after, state_shardings

FIELDS = ("obs_tm1", "a_tm1", "r_t", "discount_t", "obs_t", "weights")

QValues = Callable[[PyTree, PyTree], jax.Array]
Update = Callable[["DQNState", dict[str, Any]], tuple["DQNState", dict[str, jax.Array]]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DQNState:
    """What an update changes. Donated to the step: keep no old one."""

    step: jax.Array  # int32 [], updates so far; on all devices
    params: Any  # the online network's, as the plan's param_specs say
    opt_state: Any  # optax state of params, as the plan's opt_specs say
    loss_scale: LossScale | None  # of float16 losses; on all devices
    target: Any  # as params; of Polyak in float32 at least

    def replace(self, **changes) -> "DQNState":
        """A copy with other values for some fields."""
        return replace(self, **changes)


def init_dqn(
    params: PyTree,
    tx: optax.GradientTransformation,
    plan: ZeroPlan,
    target: TargetRule,
) -> DQNState:
    """The state before the first update; the target begins as the parameters.

    Args:
      params: as planned for, or a function without arguments that makes them.
      tx: the optimizer of the plan.
      plan: where all lies, of `shardjax.zero.plan_zero`.
      target: how the target will follow.

    Returns:
      A state of copies: the step donates it, never the arrays given.

    Raises:
      ValueError: if the parameters or the optimizer are not those of the plan, or it has
        parameters in the host's memory.
    """
    check_rule(target)
    _check_plan(plan)
    own = init_state(params, tx, plan)
    copy = init_target(own.params, target)
    return DQNState(own.step, own.params, own.opt_state, own.loss_scale, copy)


def make_dqn_update(
    q_values: QValues,
    tx: optax.GradientTransformation,
    plan: ZeroPlan,
    *,
    target: TargetRule,
    double: bool = True,
    huber: float | None = 1.0,
    clip_norm: float | None = 10.0,
    microbatches: int = 1,
) -> Update:
    """Makes the update of a learner, a pure function for jits and scans of your own.

    Args:
      q_values: `q_values(params, obs) -> [items, actions]`, the values of the actions in
        each observation. It must treat items one by one: `obs_tm1` and `obs_t` go through
        it in one call.
      tx: the optimizer of the plan.
      plan: where all lies.
      target: how the target network follows, after each update.
      double: the online network chooses the action in `obs_t`, the target says what it is
        worth; False for the target's largest value, which is too high on average.
      huber: TD errors beyond it count linearly; None for squares alone (halved).
      clip_norm: gradients are scaled down to this global norm, None for as they are.
      microbatches: as of `shardjax.zero.make_step`.

    Returns:
      `update(state, batch) -> (state, info)`. `batch` is a dict of `obs_tm1` and `obs_t`
      (trees of arrays [items, ...]), `a_tm1` (integers [items]), `r_t`, `discount_t` and
      optionally `weights` (float32 [items]), split over the plan's axes. Items of weight 0
      have no part in the update, whatever they hold: pad with them. `info` has loss,
      grad_norm, weight, and of each item `td`: |TD|, float32 [items], not weighted: what
      priorities are to be made of.

    Raises:
      ValueError: for a number that is out of range or another optimizer than the plan's,
        here; for a batch with other fields, or `q_values` of another shape, when traced.
      TypeError: for a `target` that is no rule.
    """
    check_rule(target)
    _check_plan(plan)
    check_optimizer(plan, tx)
    if huber is not None and not huber > 0:
        raise ValueError(f"`huber` must be positive or None, got {huber}")

    def values(params, obs, items: int) -> jax.Array:
        found = q_values(params, obs)
        if found.ndim != 2 or len(found) != items:
            raise ValueError(
                f"`q_values` must return one value per item and action, [{items}, actions],"
                f" got shape {found.shape}"
            )
        return found.astype(jnp.float32)

    def loss(params, batch):
        items = len(batch["r_t"])
        q_target = batch["q_target"]
        counts, goes_on = batch["weights"] != 0, batch["discount_t"] != 0
        if double:
            both = jax.tree.map(
                lambda a, b: jnp.concatenate([a, b]), batch["obs_tm1"], batch["obs_t"]
            )
            q = values(params, both, 2 * items)
            q_tm1, chosen_by = q[:items], q[items:]
        else:
            q_tm1, chosen_by = values(params, batch["obs_tm1"], items), q_target
        best = jnp.argmax(chosen_by, axis=-1)
        v_t = jnp.where(goes_on, _pick(q_target, best), 0)
        wanted = batch["r_t"] + batch["discount_t"] * v_t
        td = jax.lax.stop_gradient(wanted) - _pick(q_tm1, batch["a_tm1"])
        td = jnp.where(counts, td, 0)
        each = (
            0.5 * jnp.square(td) if huber is None else optax.huber_loss(td, delta=huber)
        )
        total = jnp.sum(batch["weights"] * each)
        return total, jnp.sum(counts, dtype=jnp.float32), jnp.abs(td)

    gradients = make_clipped_gradients(
        loss, plan, microbatches=microbatches, clip_norm=clip_norm, has_aux=True
    )
    param_specs, _ = manual_specs(plan)

    def local_values(target, obs):
        leaves = params_for_loss(plan, target)
        whole = plan.tree(in_compute_dtype(plan, leaves, leaves))
        return values(whole, obs, len(jax.tree.leaves(obs)[0]))

    def target_values(target, obs):
        return jax.shard_map(
            local_values,
            mesh=plan.mesh,
            axis_names=set(plan.mesh.axis_names) - set(plan.auto_axes),
            in_specs=(param_specs, jax.P(plan.axes)),
            out_specs=jax.P(plan.axes),
            check_vma=False,
        )(jax.tree.leaves(target), obs)

    places = state_shardings(plan).params

    def update(state: DQNState, batch: dict[str, Any]):
        batch = _checked_batch(batch)
        lagged = as_params(state.target, state.params)
        # what does not count is 0, whatever it is: 0 times a NaN is no 0, in gradients too
        counts = batch["weights"] != 0
        batch["obs_tm1"] = _where(counts, batch["obs_tm1"])
        batch["obs_t"] = _where(counts & (batch["discount_t"] != 0), batch["obs_t"])
        batch["q_target"] = target_values(lagged, batch["obs_t"])
        own = ZeroState(state.step, state.params, state.opt_state, state.loss_scale)
        grads, info, finite = gradients(own, batch)
        params, opt_state = apply_update(
            plan, tx, grads, state.opt_state, state.params, finite
        )
        step = state.step + 1
        lagged = apply_target(target, params, state.target, step)
        lagged = jax.tree.map(jax.lax.with_sharding_constraint, lagged, places)
        scale = scale_after(plan, state.loss_scale, finite)
        info["td"] = info.pop("aux")
        return DQNState(step, params, opt_state, scale, lagged), info

    return update


def make_dqn_step(
    q_values: QValues,
    tx: optax.GradientTransformation,
    plan: ZeroPlan,
    *,
    target: TargetRule,
    scan: bool = False,
    **options: Any,
) -> Update:
    """Makes the jitted step of a learner.

    Args:
      q_values, tx, plan, target: as of `make_dqn_update`.
      scan: a call takes several updates, one after the other in one program: each leaf of
        its batch has one more leading dim, [updates, items, ...], and so has what it tells.
      **options: double, huber, clip_norm and microbatches, as of `make_dqn_update`.

    Returns:
      `step(state, batch) -> (state, info)`, as `update` there; `state` is donated.
      `step.jitted` is the jitted function, for `lower`; it checks no state.

    Raises:
      ValueError: as `make_dqn_update`; at a step for a state that was given to one before,
        has an array twice, or lies otherwise than planned.

    Example:
      >>> import shardjax as sj
      >>> from shardjax import rl, zero
      >>> params, tx = {"w": np.zeros((3, 2), "f4")}, optax.sgd(0.1)
      >>> rule = rl.HardCopy(10)
      >>> plan = zero.plan_zero(params, tx, sj.make_mesh("1x1"), 0)
      >>> step = make_dqn_step(lambda p, obs: obs @ p["w"], tx, plan, target=rule)
      >>> state = init_dqn(params, tx, plan, rule)
      >>> obs, number = np.ones((4, 3), "f4"), np.ones(4, "f4")
      >>> state, info = step(state, {"obs_tm1": obs, "a_tm1": np.zeros(4, int),
      ...   "r_t": number, "discount_t": 0.99 * number, "obs_t": obs})
      >>> info["td"]
      Array([1., 1., 1., 1.], dtype=float32)
    """
    update = make_dqn_update(q_values, tx, plan, target=target, **options)
    own = state_shardings(plan)
    shardings = DQNState(
        own.step, own.params, own.opt_state, own.loss_scale, target=own.params
    )

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def run(state: DQNState, batch: dict[str, Any]):
        return jax.lax.scan(update, state, batch) if scan else update(state, batch)

    wanted = abstract_state(plan)
    lagged = jax.tree.map(
        lambda x: x.update(dtype=target_dtype(target, x.dtype)), wanted.params
    )
    return guarded_step(
        run,
        StateCheck(
            {"params": wanted.params, "opt_state": wanted.opt_state, "target": lagged}
        ),
    )


def _where(items: jax.Array, obs: PyTree) -> PyTree:
    """Observations of these items, bool [items], and zeros for the others."""

    def one(x):
        return jnp.where(items.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

    return jax.tree.map(one, obs)


def _pick(values: jax.Array, actions: jax.Array) -> jax.Array:
    """The value of each item's action, [items]; NaN for an action there is not."""
    found = jnp.take_along_axis(
        values, actions[:, None], axis=1, mode="fill", fill_value=jnp.nan
    )
    return found[:, 0]


def _checked_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """The fields of a batch, with weights, as arrays.

    Raises:
      ValueError: for others, or other shapes.
      TypeError: for actions that are no integers.
    """
    missing = [f for f in FIELDS[:-1] if f not in batch]
    unknown = [f for f in batch if f not in FIELDS]
    if missing or unknown:
        raise ValueError(
            f"a batch must have the fields {', '.join(FIELDS)} (weights may be left out),"
            f" got {', '.join(sorted(batch))}"
        )
    batch = jax.tree.map(jnp.asarray, dict(batch))
    size = np.shape(batch["r_t"])
    batch.setdefault("weights", jnp.ones(size, jnp.float32))
    for name in ("a_tm1", "r_t", "discount_t", "weights"):
        x = batch[name]
        if x.ndim != 1 or x.shape != size:
            raise ValueError(
                f"`{name}` of a batch must have a number per item, [items], as r_t has,"
                f" {list(size)}, got shape {list(x.shape)}"
            )
        if name != "a_tm1":
            batch[name] = x.astype(jnp.float32)
    if not jnp.issubdtype(batch["a_tm1"].dtype, jnp.integer):
        raise TypeError(
            f"`a_tm1` of a batch must be integers, the numbers of actions, got"
            f" {batch['a_tm1'].dtype}"
        )
    return batch


def _check_plan(plan: ZeroPlan) -> None:
    if plan.offload == "all":
        raise ValueError(
            "a learner needs its parameters on the devices, and the plan has offload 'all'."
            " Plan with offload 'opt_state' or 'none'"
        )

"""Training steps, and a short loop around them.

A step is one jitted function. Inside `jax.shard_map` every device gathers its unique
rows, exchanges them, runs the user's model on its examples and differentiates with
respect to (params, rows); gradients of params are summed over the devices, gradients of
rows go back to their owners and are applied there. The optimizer of the parameters runs
outside shard_map, in the same jit, on the parts that a `shardjax.zero` plan gives each
device. The whole state is donated.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardjax.embed import EmbeddingCollection, sequence_masks, split_features
from shardjax.evaluation import (
    add_counters as add_counters,
    evaluate as evaluate,
    make_apply_step as make_apply_step,
    make_eval_step as make_eval_step,
)
from shardjax.microbatches import in_microbatches
from shardjax.network import Network
from shardjax.objectives import (
    OF_LOGITS,
    Loss as Loss,
    Objective as Objective,
    as_it_is,
    binary_cross_entropy as binary_cross_entropy,
    losses_of,
    losses_of_logits,
    update_metrics,
)
from shardjax.pacing import Pace
from shardjax.precision import all_finite, choose
from shardjax.preparing import (
    PreparedBatch as PreparedBatch,
    check_prepared,
    prepare as prepare,
    prepare_stream as prepare_stream,
    prepare_window as prepare_window,
)
from shardjax.rl.table_target import check_targets, copy_targets, read_target
from shardjax.rl.target import apply_target, as_params, target_dtype
from shardjax.state import TrainState, plan_network
from shardjax.zero import ZeroPlan, apply_update
from shardjax.zero.checks import StateCheck, check_optimizer
from shardjax.zero.exchange import (
    in_compute_dtype,
    in_param_dtype,
    manual_specs,
    params_for_loss,
    scatter_gradients,
    sum_whole_gradients,
    trained_leaves,
)
from shardjax.zero.step import abstract_state, scale_after


def _own_keys(state, axes):
    """Model state whose PRNG keys differ per device, so that dropout masks do."""

    def fold(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(x, jax.lax.axis_index(axes))
        return x

    return jax.tree.map(fold, state)


def _shared_state(new, old, axes, counts=None):
    """Model state after a step, equal on all devices: statistics are averaged.

    With `counts`, the examples that count on this device, devices took as many turns as
    they have such examples: averages are weighted by them, and of numbers, such as how
    often a key was used, the largest is right for all.
    """
    if counts is not None:
        here = jnp.sum(counts)
        total = jax.lax.psum(here, axes)
        weight = here / jnp.maximum(total, 1)

    def share(new, old):
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            return old
        if counts is None:
            is_float = jnp.issubdtype(new.dtype, jnp.floating)
            return jax.lax.pmean(new, axes) if is_float else new
        if jnp.issubdtype(new.dtype, jnp.floating):
            mean = jax.lax.psum(new * weight.astype(new.dtype), axes)
            return jnp.where(total == 0, old, mean)
        number = new.astype(jnp.uint8) if new.dtype == bool else new
        return jax.lax.pmax(number, axes).astype(new.dtype)

    return jax.tree.map(share, new, old)


def make_train_step(
    network: Network,
    tx: optax.GradientTransformation,
    collection: EmbeddingCollection,
    *,
    loss: Loss = binary_cross_entropy,
    predict: Callable[[jax.Array], jax.Array] = jax.nn.sigmoid,
    microbatch_size: int | None = None,
    skip_padding: bool = False,
    pace: Pace | None = None,
    zero: ZeroPlan | None = None,
    objective: Objective | None = None,
) -> Callable[[TrainState, PreparedBatch], tuple[TrainState, dict[str, jax.Array]]]:
    """Makes the training step.

    The loss of a step is sum(weights * loss) / sum(weights) over the whole batch, on all
    devices. Examples without weight have no part in it, whatever their label; their rows
    and those of a batch without any weight get a zero gradient. A model must be finite
    where all its inputs are zero: so is the padding of the last batch.

    Args:
      network: of `shardjax.network`.
      tx: optimizer of the parameters; rows have their own, in their TableSpec.
      collection: the tables.
      loss: of (logits [batch], labels [batch]), per example [batch].
      predict: logits to the predictions that metrics see.
      microbatch_size: examples per device that go through the model at a time, None for
        all. Gradients are accumulated, so the result is the same up to rounding (but for
        layers that mix examples, such as batch norm). On a CPU 512-1024 keeps the
        activations in cache.
      skip_padding: whether each device leaves out what lies behind its last microbatch
        that has an example of weight. The result is the same, but that the model's state
        does not see the padding: a batch norm has the statistics of real examples,
        averaged over devices by how many they have. For parts of unequal size, as of
        `shardjax.data.BlockShare`. Not for networks in which devices wait for each
        other. How many microbatches there are is known on the device alone then, which a
        GPU asks it for each time, so leave it off where there is nothing to skip.
      pace: keeps the step from running too far ahead of the devices, and notes when they
        have nothing to do; None for one of its own.
      zero: of `shardjax.plan_network`: how the network's parameters, gradients and
        optimizer state are split over the devices, and the dtypes to compute in. None for
        all of them on every device, in float32. The state must be of the same plan.
      objective: in place of `loss` and `predict`, such as `shardjax.rl.QLearning`. The loss
        of a step is then sum(weights * losses) / examples with a weight. With a target, the
        state must be of `init_state(..., target=objective.target)` and each table's
        optimizer of `shardjax.rl.keep_target` with the same rule.

    Returns:
      `step(state, batch) -> (state, {"loss": float32 []})`. `state` is donated. Where the
      plan scales the loss, also `loss_scale` and `skipped`: a step in which a gradient
      overflows moves neither parameters nor rows. With an objective, also `predictions`,
      float32 [devices * examples], of which the first `batch.size` are those of the batch.

    Raises:
      ValueError: for another optimizer than the plan's, a size that is not positive, an
        objective beside a loss, or tables without the objective's target, here; at a step
        for a state that was given to one before, has an array twice, or lies otherwise
        than planned, and with `skip_padding` for a network in which devices wait for each
        other.
    """
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"`microbatch_size` must be positive, got {microbatch_size}")
    rule = None if objective is None else objective.target
    if objective is not None and (loss, predict) != OF_LOGITS:
        raise ValueError(
            "`objective` must not come with `loss` or `predict`, which it stands for, got"
            f" {objective}. Leave them out"
        )
    if rule is not None:
        check_targets(collection.groups, rule)
    mesh, axes = collection.mesh, collection.axes
    plan = zero or plan_network(network, tx, collection)
    if zero is not None:
        check_optimizer(zero, tx)
    precision = plan.precision
    param_specs, grad_specs = manual_specs(plan)

    def local_step(
        params, lagged, model_state, tables, metrics, packed, loss_scale, *, layout
    ):
        arrays = layout.unpack(packed[0])
        if rule is not None:
            tables = collection.map_row_state(tables, copy_targets)
        rows = collection.gather_rows(tables, arrays)
        counted = arrays["weights"] if objective is None else arrays["weights"] != 0
        total = jax.lax.psum(jnp.sum(counted, dtype=jnp.float32), axes)
        scale = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
        params = params_for_loss(plan, params)

        def embed(rows):
            return collection.embed(rows, arrays, layout)

        lagged_blocks = {}
        if rule is not None:
            lagged = params_for_loss(plan, lagged)
            lagged_blocks = embed(collection.gather_rows(tables, arrays, read_target))

        def outputs_of(params, model_state, dense, blocks, masks, *, train):
            blocks, dense = precision.cast((blocks, dense))
            embeddings = split_features(layout, blocks, masks)
            return network.apply(params, model_state, dense, embeddings, train=train)

        def lagged_outputs(model_state, dense, blocks, masks):
            if rule is None:
                return None
            whole = plan.tree(in_compute_dtype(plan, lagged, lagged))
            outputs, _ = outputs_of(
                whole, model_state, dense, blocks, masks, train=False
            )
            return jax.lax.stop_gradient(outputs)

        def loss_of(trained, blocks, model_state, dense, labels, weights, *others):
            masks, lagged_blocks = others
            whole = plan.tree(in_compute_dtype(plan, trained, params))
            outputs, new_state = outputs_of(
                whole, model_state, dense, blocks, masks, train=True
            )
            if objective is None:
                losses, logits = losses_of_logits(loss, outputs, labels, weights)
            else:
                seen = lagged_outputs(model_state, dense, lagged_blocks, masks)
                losses, logits = losses_of(
                    objective, outputs, seen, labels, weights, dense
                )
            value = jnp.sum(weights * losses) * scale
            scaled = value if loss_scale is None else value * loss_scale
            return scaled, (value, logits, losses, new_state)

        def grad_of(*args):
            both = jax.grad(loss_of, argnums=(0, 1), has_aux=True)
            (grads, block_grads), aux = both(*args)
            return (in_param_dtype(plan, grads), block_grads), aux

        blocks, pull = jax.vjp(embed, rows)
        masks = sequence_masks(layout, arrays)
        counts = arrays["weights"] != 0 if skip_padding else None
        value, grads, block_grads, aux = in_microbatches(
            grad_of,
            microbatch_size,
            trained_leaves(plan, params),
            _own_keys(model_state, axes),
            blocks,
            (
                arrays["dense"],
                arrays["labels"],
                arrays["weights"],
                masks,
                lagged_blocks,
            ),
            counts,
        )
        grads = sum_whole_gradients(plan, scatter_gradients(plan, grads))
        (row_grads,) = pull(block_grads)
        finite = jnp.array(True)
        if loss_scale is not None:
            grads, row_grads = jax.tree.map(
                lambda g: g / loss_scale, (grads, row_grads)
            )
            here = all_finite((grads, row_grads))
            finite = jax.lax.pmin(here.astype(jnp.int32), axes) > 0
        kept = None if loss_scale is None else finite
        tables = collection.update_rows(tables, rows, row_grads, arrays, kept)
        logits, losses, new_state = aux
        return (
            jax.lax.psum(value, axes),
            grads,
            finite,
            _shared_state(new_state, model_state, axes, counts),
            tables,
            update_metrics(metrics, arrays, logits, losses, predict),
            None if objective is None else logits,
        )

    spec = collection.state_spec()
    by_device = jax.P(axes)
    if objective is not None:
        predict = as_it_is

    @partial(jax.jit, static_argnames="layout", donate_argnames="state")
    def run(state: TrainState, packed, *, layout):
        scale = state.loss_scale.scale if state.loss_scale else None
        lagged = state.target
        if rule is not None:
            lagged = jax.tree.leaves(as_params(lagged, state.params))
        lagged_specs = jax.P() if rule is None else param_specs
        value, grads, finite, model_state, tables, metrics, predictions = jax.shard_map(
            partial(local_step, layout=layout),
            mesh=mesh,
            in_specs=(
                *(param_specs, lagged_specs, jax.P(), spec),
                *(by_device, by_device, jax.P()),
            ),
            out_specs=(
                *(jax.P(), grad_specs, jax.P(), jax.P(), spec),
                *(by_device, by_device),
            ),
            check_vma=False,
        )(
            jax.tree.leaves(state.params),
            lagged,
            state.model_state,
            state.tables,
            state.metrics,
            packed,
            scale,
        )
        kept = None if scale is None else finite
        params, opt_state = apply_update(
            plan, tx, plan.tree(grads), state.opt_state, state.params, kept
        )
        loss_scale = scale_after(plan, state.loss_scale, kept)
        info = {"loss": value}
        if loss_scale is not None:
            info |= {"loss_scale": scale, "skipped": loss_scale.skipped}
        if objective is not None:
            info["predictions"] = predictions
        lagged = state.target
        if rule is not None:
            lagged = apply_target(rule, params, lagged, state.step + 1)
            lagged = jax.tree.map(jax.lax.with_sharding_constraint, lagged, places)
        return TrainState(
            step=state.step + 1,
            params=params,
            model_state=choose(kept, model_state, state.model_state),
            opt_state=opt_state,
            loss_scale=loss_scale,
            tables=tables,
            metrics=metrics,
            target=lagged,
        ), info

    pace = pace or Pace()
    wanted = abstract_state(plan)
    parts = {"params": wanted.params, "opt_state": wanted.opt_state}
    if rule is not None:
        parts["target"] = jax.tree.map(
            lambda x: x.update(dtype=target_dtype(rule, x.dtype)), wanted.params
        )
    places = jax.tree.map(lambda x: x.sharding, wanted.params)
    check = StateCheck(parts)

    def step(state: TrainState, batch: PreparedBatch):
        check_prepared(batch)
        state = check(state)
        pace.wait()
        tables = collection.apply_fills(state.tables, batch.plan)
        state = state.replace(tables=tables)
        state, info = run(state, batch.packed, layout=batch.layout)
        check.returned(state)
        pace.add(info["loss"])
        return state, info

    step.jitted = run
    return step


Hook = Callable[[int, TrainState, dict[str, Any]], None]


def fit(
    step,
    state: TrainState,
    batches: Iterable[PreparedBatch],
    *,
    steps: int | None = None,
    hooks: Iterable[Hook] = (),
) -> tuple[TrainState, dict[str, float]]:
    """Steps through batches.

    Args:
      step: of `make_train_step`.
      state: donated.
      batches: prepared with `train=True`, one epoch or an endless stream.
      steps: stop after this many, None for all.
      hooks: each called after every step as `hook(number of steps taken here, state, info)`;
        info has the loss (a device array: reading it waits for the step), the batch's
        counters and its size. A hook must not keep the state.

    Returns:
      The state and the summed counters.

    Raises:
      ValueError: for a negative number of steps.
    """
    counters: dict[str, float] = {}
    hooks = tuple(hooks)
    taken = 0
    if steps is not None and steps < 0:
        raise ValueError(f"`steps` must not be negative, got {steps}")
    if steps == 0:
        return state, counters
    for batch in batches:
        state, info = step(state, batch)
        taken += 1
        add_counters(counters, batch.counters)
        details = {**info, "counters": batch.counters, "size": batch.size}
        for hook in hooks:
            hook(taken, state, details)
        if taken == steps:
            break
    return state, counters

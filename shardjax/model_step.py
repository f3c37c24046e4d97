"""Training steps for models that look their tables up themselves.

The tables are those of a `shardjax.embed.TablePlan`; all other parameters are those of a
`shardjax.zero.ZeroPlan` over the same devices. Inside `jax.shard_map` each device finds
which rows its examples need, reads them from the devices that have them, and differentiates
with respect to (params, rows); rows are moved by their own optimizers there, parameters
outside, as `shardjax.zero.make_step` does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardjax.embed import TablePlan, TableState
from shardjax.pacing import Pace
from shardjax.precision import LossScale, all_finite
from shardjax.zero import Loss, ZeroPlan, apply_update, init_state, state_shardings
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
from shardjax.zero.gradients import check_batch, checked_loss
from shardjax.zero.guarded import guarded_step
from shardjax.zero.offload import scale_gradients
from shardjax.zero.step import abstract_state, scale_after


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelState:
    """What a step changes. Donated to the step: keep no old one."""

    step: jax.Array  # int32 [], steps taken; on all devices
    params: Any  # all but the tables, as the ZeRO plan says; None for each table
    opt_state: Any  # optax state of params, as the ZeRO plan says
    loss_scale: LossScale | None  # where the loss is scaled; on all devices
    tables: dict[str, TableState]  # by path, rows split over the devices

    def replace(self, **changes) -> "ModelState":
        """A copy with other values for some fields."""
        return replace(self, **changes)


def init_model_state(
    params: PyTree, tx: optax.GradientTransformation, tables: TablePlan, zero: ZeroPlan
) -> ModelState:
    """The state before the first step: copies, to be donated.

    Args:
      params: all parameters, tables included.
      tx: optimizer of those that are no tables.
      tables: of `plan_tables`, with a mesh.
      zero: of `plan_zero(tables.split(params), tx, mesh, stage, axes=tables.axes)`.

    Raises:
      ValueError: if the plans are not for the same devices, or for other parameters.
    """
    _check_plans(tables, zero)
    dense = init_state(tables.split(params), tx, zero)
    return ModelState(
        dense.step, dense.params, dense.opt_state, dense.loss_scale, tables.init(params)
    )


def make_model_step(
    loss: Loss,
    tx: optax.GradientTransformation,
    tables: TablePlan,
    zero: ZeroPlan,
    *,
    microbatches: int = 1,
    seed: int | None = None,
) -> Callable[[ModelState, PyTree], tuple[ModelState, dict[str, jax.Array]]]:
    """Makes the training step of a loss.

    It minimises sum(loss_sum) / sum(weight) over all microbatches and devices. A row that
    the batch looks up is moved once, by the sum of its gradients; other rows do not move.

    Args:
      loss: `loss(params, batch) -> (loss_sum, weight)`, float32 [] both, of a device's
        part of a microbatch. With a `seed` it is called with `key=`, a PRNG key of its own
        for each step, microbatch and device. `params` have the structure that was planned
        for: merge them into your model (`nnx.merge`).
      tx: optimizer of what are no tables, that of `zero`.
      tables: of `plan_tables`, with a mesh.
      zero: of `plan_zero`, for `tables.split(params)` and the same mesh axes.
      microbatches: parts of the batch that go through the loss one after the other.
      seed: of the keys, None for a loss without.

    Returns:
      `step(state, batch) -> (state, info)`. `state` is donated. `batch` is a tree of arrays
      [examples, ...], split over the devices; in the place of `shardjax.embed.Keys` the
      loss gets numbers of rows, and new keys have got rows. `info`: loss and weight,
      float32 [], and bad_ids, int32 [], how many ids were outside of their tables, such as
      keys for which there was no room; where the loss is scaled also loss_scale and
      skipped, the number of steps that were so far.
      `step.jitted` is the jitted function, for `lower`; it checks no state.

    Raises:
      ValueError: for plans of different devices, another optimizer than the plan's, or a
        number of microbatches that is not positive, here; for a batch that does not divide,
        a loss that returns something else, or a state that lies otherwise than planned, at
        a step.

    Example:
      >>> import shardjax as sj
      >>> from flax import nnx
      >>> class Model(nnx.Module):
      ...   def __init__(self, rngs):
      ...     self.item = sj.embed.Embed(100, 4, rngs=rngs)
      ...     self.out = nnx.Linear(4, 1, rngs=rngs)
      ...   def __call__(self, ids):
      ...     return self.out(self.item(ids))[:, 0]
      >>> model, mesh, tx = Model(nnx.Rngs(0)), sj.make_mesh("1x1"), optax.adam(1e-3)
      >>> graph, params, rest = nnx.split(model, nnx.Param, ...)
      >>> def loss(params, batch):
      ...   out = nnx.merge(graph, params, rest)(batch["ids"])
      ...   return jnp.sum((out - batch["y"]) ** 2), jnp.float32(out.size)
      >>> tables = sj.embed.plan_tables(
      ...   params, sj.embed.table_paths(model), optax.adagrad(0.1), mesh=mesh)
      >>> plan = sj.zero.plan_zero(tables.split(params), tx, mesh, 2, axes=tables.axes)
      >>> state = init_model_state(params, tx, tables, plan)
      >>> step = make_model_step(loss, tx, tables, plan)
      >>> batch = {"ids": jnp.array([3, 7, 3]), "y": jnp.ones(3)}
      >>> state, info = step(state, batch)
      >>> int(state.step), int(info["bad_ids"])
      (1, 0)
      >>> trained = nnx.merge(graph, tables.join(state.params, state.tables), rest)
      >>> trained.item.embedding.shape
      (100, 4)
    """
    check_optimizer(zero, tx)
    _check_plans(tables, zero)
    if microbatches < 1 or isinstance(microbatches, bool):
        raise ValueError(f"`microbatches` must be positive, got {microbatches}")
    gradients = _make_gradients(loss, tables, zero, microbatches, seed)
    dense_shardings = state_shardings(zero)
    shardings = ModelState(
        dense_shardings.step,
        dense_shardings.params,
        dense_shardings.opt_state,
        dense_shardings.loss_scale,
        tables.shardings(),
    )

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def run(state: ModelState, batch):
        scale = state.loss_scale.scale if state.loss_scale else None
        grads, new_tables, info, finite = gradients(state, batch, scale)
        kept = None if scale is None else finite
        params, opt_state = apply_update(
            zero, tx, grads, state.opt_state, state.params, kept
        )
        loss_scale = scale_after(zero, state.loss_scale, kept)
        if loss_scale is not None:
            info |= {"loss_scale": scale, "skipped": loss_scale.skipped}
        return ModelState(
            state.step + 1, params, opt_state, loss_scale, new_tables
        ), info

    wanted = abstract_state(zero)
    return guarded_step(
        run,
        StateCheck(
            {
                "params": wanted.params,
                "opt_state": wanted.opt_state,
                "tables": tables.abstract(),
            }
        ),
    )


def make_model_eval(
    predict: Callable[[PyTree, PyTree], PyTree], tables: TablePlan, zero: ZeroPlan
) -> Callable[[ModelState, PyTree], tuple[PyTree, dict[str, jax.Array]]]:
    """Makes a function that runs a model as it is trained, and changes nothing.

    Args:
      predict: `predict(params, batch) -> outputs`, arrays [examples, ...] of a device's part
        of a batch.
      tables, zero: as of `make_model_step`.

    Returns:
      `evaluate(state, batch) -> (outputs, info)`, outputs split over the devices as the
      batch is. Of `info`, int32 []: bad_ids, how many ids were outside of their tables, and
      unseen, how many valid keys have no row. They have the id -1. A call waits until all
      but the last two are done; `evaluate.jitted` is the jitted function.

    Raises:
      ValueError: for plans of different devices, here; for a batch that does not divide, at
        a call.
    """
    _check_plans(tables, zero)
    axes = zero.axes

    def local(params, local_tables, batch):
        params = params_for_loss(zero, params)
        batch, local_tables, unseen = tables.translate(
            local_tables, batch, insert=False
        )

        def value_of(handles, trained, batch):
            full = zero.tree(in_compute_dtype(zero, trained, params))
            return predict(tables.insert(full, handles), batch)

        given = trained_leaves(zero, params)
        blocks, _ = tables.gather(value_of, local_tables, given, batch)
        rows = {path: block.rows for path, block in blocks.items()}
        outputs = value_of(tables.handles(blocks, rows), given, batch)
        bad = sum(block.bad_ids for block in blocks.values())
        info = jax.lax.psum({"bad_ids": jnp.int32(bad), "unseen": unseen}, axes)
        return outputs, info

    manual = set(zero.mesh.axis_names) - set(zero.auto_axes)
    specs, _ = manual_specs(zero)

    @jax.jit
    def run(state: ModelState, batch):
        check_batch(zero, batch, 1)
        return jax.shard_map(
            local,
            mesh=zero.mesh,
            axis_names=manual,
            in_specs=(specs, tables.specs(), jax.P(axes)),
            out_specs=(jax.P(axes), jax.P()),
            check_vma=False,
        )(jax.tree.leaves(state.params), state.tables, batch)

    pace = Pace()

    def evaluate(state: ModelState, batch):
        pace.wait()
        outputs, info = run(state, batch)
        pace.add(info["bad_ids"])
        return outputs, info

    evaluate.jitted = run
    return evaluate


def _check_plans(tables: TablePlan, zero: ZeroPlan) -> None:
    if tables.mesh != zero.mesh or tables.axes != zero.axes:
        raise ValueError(
            "the tables and the ZeRO plan must be split over the same devices, got"
            f" {_devices(tables)} for the tables and {_devices(zero)} for the rest. Give"
            " both plans the same `mesh` and `axes`"
        )


def _devices(plan: TablePlan | ZeroPlan) -> str:
    shape = dict(plan.mesh.shape) if plan.mesh is not None else None
    return f"axes {plan.axes} of the mesh {shape}"


def _make_gradients(
    loss: Loss, tables: TablePlan, zero: ZeroPlan, microbatches: int, seed: int | None
):
    """`gradients(state, batch, scale) -> (grads, tables, info, finite)`, for jit."""
    axes = zero.axes

    def local(params, local_tables, batch, step, scale):
        params = params_for_loss(zero, params)
        index = jax.lax.axis_index(axes)
        batch, local_tables, _ = tables.translate(local_tables, batch)

        def value_of(handles, trained, batch, number):
            more = {}
            if seed is not None:
                key = jax.random.fold_in(jax.random.key(seed), step)
                key = jax.random.fold_in(key, number)
                more["key"] = jax.random.fold_in(key, index)
            full = zero.tree(in_compute_dtype(zero, trained, params))
            full = tables.insert(full, handles)
            total, weight = checked_loss(loss(full, batch, **more))
            # scaled before the backward pass, in which small numbers get lost
            share = 1.0 if scale is None else scale / jnp.maximum(weight, 1.0)
            return total * share, (total, weight, share)

        def one(local_tables, batch, number):
            given = trained_leaves(zero, params)
            blocks, local_tables = tables.gather(
                value_of, local_tables, given, batch, number
            )

            def of(given, rows):
                return value_of(tables.handles(blocks, rows), given, batch, number)

            rows = {path: block.rows for path, block in blocks.items()}
            grad_of = jax.grad(of, (0, 1), has_aux=True)
            (grads, row_grads), (total, weight, share) = grad_of(given, rows)
            grads = in_param_dtype(zero, grads)
            if scale is not None:
                grads, row_grads = jax.tree.map(lambda g: g / share, (grads, row_grads))
            if zero.stage == 2:
                grads = scatter_gradients(zero, grads)
            row_grads = tables.row_gradients(blocks, row_grads)
            return local_tables, (total, weight, grads), row_grads

        local_tables, (total, weight, grads), row_grads = _accumulate(
            one, local_tables, batch, microbatches
        )
        bad = sum(jnp.sum(g.bad_ids) for g in row_grads.values())
        total, weight, bad = jax.lax.psum((total, weight, jnp.int32(bad)), axes)
        if zero.stage != 2:
            grads = scatter_gradients(zero, grads)
        grads = sum_whole_gradients(zero, grads)
        mean = jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))
        grads = scale_gradients(zero, grads, mean)
        row_grads = {
            path: replace(g, grads=g.grads * mean) for path, g in row_grads.items()
        }
        finite = jnp.array(True)
        if scale is not None:
            here = all_finite((grads, [g.grads for g in row_grads.values()]))
            finite = jax.lax.pmin(here.astype(jnp.int32), axes) > 0
        local_tables = tables.update(
            local_tables, row_grads, None if scale is None else finite
        )
        info = {"loss": total * mean, "weight": weight, "bad_ids": bad}
        return grads, local_tables, info, finite

    manual = set(zero.mesh.axis_names) - set(zero.auto_axes)
    specs, grad_specs = manual_specs(zero)

    def gradients(state: ModelState, batch, scale):
        check_batch(zero, batch, microbatches)
        grads, new_tables, info, finite = jax.shard_map(
            local,
            mesh=zero.mesh,
            axis_names=manual,
            in_specs=(specs, tables.specs(), jax.P(axes), jax.P(), jax.P()),
            out_specs=(grad_specs, tables.specs(), jax.P(), jax.P()),
            check_vma=False,
        )(jax.tree.leaves(state.params), state.tables, batch, state.step, scale)
        return zero.tree(grads), new_tables, info, finite

    return gradients


def _accumulate(one, tables, batch, microbatches: int):
    """Sums of the gradients of parameters over microbatches; those of rows stacked."""
    if microbatches == 1:
        return one(tables, batch, 0)

    def split(x):
        return x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])

    parts = jax.tree.map(split, batch)

    def body(carry, part):
        tables, sums = carry
        tables, more, row_grads = one(tables, *part)
        return (tables, jax.tree.map(jnp.add, sums, more)), row_grads

    first = jax.tree.map(lambda x: x[0], parts)
    _, shapes, _ = jax.eval_shape(one, tables, first, 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (tables, sums), row_grads = jax.lax.scan(
        body, (tables, zeros), (parts, jnp.arange(microbatches))
    )
    return tables, sums, row_grads

"""Training steps whose optimizer keeps its state on disk."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from shardjax.zero.checks import StateCheck
from shardjax.zero.disk_file import Traffic
from shardjax.zero.disk_state import DiskOptimizer
from shardjax.zero.gradients import Loss
from shardjax.zero.step import (
    ZeroState,
    abstract_state,
    make_clipped_gradients,
    scale_after,
)


def make_disk_step(
    loss: Loss,
    optimizer: DiskOptimizer,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    seed: int | None = None,
) -> Callable[[ZeroState, PyTree], tuple[ZeroState, dict[str, Any]]]:
    """Makes the training step of a loss, as `make_step`, with state on disk.

    Args:
      loss, microbatches, clip_norm, seed: as of `make_step`.
      optimizer: with the plan; its `init_state` makes the first state.

    Returns:
      `step(state, batch) -> (state, info)` as of `make_step`; not to be called inside jit.
      `info` has besides, as numbers for this step: disk_read_bytes, disk_written_bytes,
      disk_read_s and disk_write_s of the threads, and disk_wait_s, for which the devices
      waited. What a thread still writes or reads ahead counts for the next step.

    Raises:
      ValueError: as `make_step`.
      DiskStateError, OSError: at a step whose state cannot be used, read or written.
    """
    plan = optimizer.plan
    gradients = make_clipped_gradients(
        loss, plan, microbatches=microbatches, clip_norm=clip_norm, seed=seed
    )
    split = [
        jax.NamedSharding(plan.mesh, p.split_spec) for p in plan.leaves if p.trained
    ]

    @partial(jax.jit, out_shardings=(split, None, None, None))
    def compute(state: ZeroState, batch):
        grads, info, finite = gradients(state, batch)
        scale = scale_after(plan, state.loss_scale, finite)
        return jax.tree.leaves(grads), info, finite, (state.step + 1, scale)

    told: list[Traffic] = []  # what the last step ended with
    check = StateCheck({"params": abstract_state(plan).params})

    def step(state: ZeroState, batch):
        optimizer.check()
        state = check(state)
        before = told.pop() if told else optimizer.traffic
        grads, info, finite, (count, scale) = compute(
            state.replace(opt_state=None), batch
        )
        params, opt_state = state.params, state.opt_state
        if finite is None or bool(finite):
            params, opt_state = optimizer.update(grads, opt_state, params)
        new = ZeroState(count, params, opt_state, scale)
        check.returned(new)
        told.append(optimizer.traffic)
        return new, info | told[-1].since(before)

    return step

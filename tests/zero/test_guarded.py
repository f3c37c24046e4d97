"""A loop that reads nothing is never far ahead of the devices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from shardjax.zero.checks import StateCheck
from shardjax.zero.guarded import guarded_step
from tests.zero.test_checks import prepared, small_batch


@jax.tree_util.register_dataclass
@dataclass
class State:
    params: jax.Array


@jax.jit
def slow(state, batch):
    """Takes far longer than to be called."""
    x = jax.lax.fori_loop(0, 30, lambda _, x: jnp.tanh(x @ x), state.params)
    return State(x), {"loss": x.sum()}


def test_two_steps_are_under_way():
    step = guarded_step(slow, StateCheck({}))
    state, losses, ahead = State(jnp.ones((400, 400))), [], 0
    for _ in range(8):
        state, info = step(state, None)
        losses.append(info["loss"])
        under_way = [not x.is_ready() for x in losses]
        assert not any(under_way[:-2])
        ahead += sum(under_way[:-1])
    assert ahead  # it goes on while a step is under way


def test_a_loop_that_reads_nothing_goes_on():
    """It stopped for good on 8 simulated devices."""
    _, state, step = prepared(stage=3)
    batch = small_batch(0)
    for _ in range(200):
        state, info = step(state, batch)
    assert int(state.step) == 200
    assert isinstance(step.jitted, jax.stages.Wrapped)


def test_a_step_may_be_inside_of_a_jit():
    _, state, step = prepared(stage=0, mesh="1x1")
    batch = small_batch(0)
    twice = jax.jit(lambda state: step(step(state, batch)[0], batch))
    inside, info = twice(state)
    alone, _ = step(state, batch)
    alone, expected = step(alone, batch)
    assert int(inside.step) == int(alone.step) == 2
    assert float(info["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)

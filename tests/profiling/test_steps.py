"""Times of steps, with a clock of our own."""

import jax.numpy as jnp
import pytest

from shardjax.profiling import StepTimer


def _timer(times, warmup=1):
    return StepTimer(warmup, clock=iter(times).__next__)


def test_warm_up_is_left_out():
    timer = _timer([100.0, 110.0, 111.0, 113.0, 116.0, 117.0], warmup=2)
    for _ in range(6):
        timer.block(jnp.ones(2))
    assert timer.steps == 4  # of 1, 2, 3 and 1 seconds
    assert timer.median == 1.5
    assert timer.percentile(0) == 1.0
    assert timer.percentile(100) == 3.0
    assert timer.per_second(7) == 7 * 4 / 7


def test_several_steps_between_two_points_share_their_time():
    timer = _timer([0.0, 6.0, 7.0])
    timer.block(None)
    timer.block({"loss": jnp.ones(2)}, steps=3)
    timer.block(None)
    assert timer.steps == 4
    assert timer.percentile(100) == 2.0
    assert timer.per_second(14) == 8.0


def test_times_need_a_step_after_warm_up():
    timer = _timer([0.0, 1.0], warmup=2)
    timer.block(None)
    with pytest.raises(ValueError, match="got none: `block` must be called 2 more"):
        _ = timer.median
    timer.block(None)
    with pytest.raises(
        ValueError, match="called 1 more times. Run more steps or lower"
    ):
        timer.per_second(1)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="`warmup` must be positive, got 0. Give 1"):
        StepTimer(0)
    with pytest.raises(ValueError, match="`steps` must be positive, got 0. Give how"):
        _timer([0.0]).block(None, steps=0)
    with pytest.raises(
        ValueError, match="`percent` must lie between 0 and 100, got 101"
    ):
        _timer([]).percentile(101)

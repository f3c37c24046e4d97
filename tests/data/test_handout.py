"""Blocks that are asked for: all are handed out, and nobody ends late who need not."""

import heapq

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.data import BlockSchedule, Handout
from shardjax.data.blocks import assign


def play(handout, seconds):
    """Processes with constant times ask until they are sent on; when the last ends."""
    waiting, end = [(0.0, process) for process in range(len(seconds))], 0.0
    while waiting:
        now, process = heapq.heappop(waiting)
        if handout.take(process, now):
            heapq.heappush(waiting, (now + seconds[process], process))
        else:
            end = max(end, now)
    return end


times = st.floats(0.1, 10)


@given(st.lists(times, min_size=1, max_size=6), st.integers(0, 40), st.data())
def test_all_blocks_are_handed_out(seconds, blocks, data):
    schedule = BlockSchedule(
        len(seconds), most=data.draw(st.none() | st.integers(7, 50))
    )
    if schedule.most and blocks > schedule.most * len(seconds):
        blocks = schedule.most
    for _ in range(data.draw(st.integers(0, 3))):  # what is expected may be all wrong
        wrong = data.draw(st.lists(times, min_size=len(seconds), max_size=len(seconds)))
        schedule.observe(wrong, [1] * len(seconds))
    handout = Handout(schedule, blocks)
    play(handout, seconds)
    assert handout.left == 0 and sum(handout.counts) == blocks
    assert max(handout.counts) <= (schedule.most or blocks)


@given(st.lists(times, min_size=1, max_size=6), st.integers(1, 40))
def test_with_the_right_times_it_is_the_best_split(seconds, blocks):
    schedule = BlockSchedule(len(seconds))
    for _ in range(2):
        schedule.observe(seconds, [1] * len(seconds))
    best = (assign(blocks, seconds) * seconds).max()
    found = play(Handout(schedule, blocks), seconds)
    assert found <= best * (1 + 1e-9) + max(seconds) * 1e-9


@given(st.lists(times, min_size=1, max_size=6), st.integers(6, 40))
def test_knowing_nothing_costs_a_block_at_most(seconds, blocks):
    best = (assign(blocks, seconds) * seconds).max()
    assert play(Handout(BlockSchedule(len(seconds)), blocks), seconds) <= (
        best + max(seconds) + 1e-9
    )


def test_a_process_that_turns_slow_gets_no_more():
    schedule = BlockSchedule(4)
    for _ in range(3):
        schedule.observe([8.0] * 4, [8] * 4)
    handout = Handout(schedule, 32)
    assert play(handout, [1, 1, 1, 6.0]) == 11  # 10 is the best
    assert handout.counts[3] == 1
    # the split made beforehand takes 48
    assert (schedule.next(32) * [1, 1, 1, 6.0]).max() == 48


def test_a_process_without_data_is_out():
    handout = Handout(BlockSchedule(2), 3, limits=[3, 0])
    assert [handout.take(0, now) for now in (0.0, 1.0, 2.0, 3.0)] == [True] * 3 + [
        False
    ]
    assert not handout.take(1, 3.0)


def test_a_process_that_is_due_gets_one():
    schedule = BlockSchedule(2)
    schedule.observe([4.0, 4.0], [4, 4])
    schedule.observe([4.0, 400.0], [4, 4])
    handout = Handout(schedule, 4)
    assert not handout.take(1, 0.0)
    for _ in range(schedule.balance.patience):
        counts = schedule.next(4)
        assert counts.tolist() == [4, 0] or counts[1] == 1
        schedule.observe([4.0, 0.0], [4, 0])
    assert Handout(schedule, 4).take(1, 0.0)


def test_take_refuses():
    handout = Handout(BlockSchedule(2), 1)
    with pytest.raises(ValueError, match="`process` must be one of 2, from 0, got 2"):
        handout.take(2, 0.0)
    with pytest.raises(TypeError, match="`process` must be an integer, got '0'"):
        handout.take("0", 0.0)
    assert handout.take(0, 1.0)
    with pytest.raises(
        ValueError, match="`now` must not go back, got 0.5 of process 1"
    ):
        handout.take(1, 0.5)
    with pytest.raises(
        ValueError, match="`now` must not go back, got nan of process 1"
    ):
        handout.take(1, np.nan)
    assert not handout.take(0, 2.0)
    with pytest.raises(
        ValueError, match="process 0 must not ask again: .* with 1 blocks"
    ):
        handout.take(0, 3.0)
    with pytest.raises(ValueError, match="must not exceed what 2 processes can take"):
        Handout(BlockSchedule(2, most=1), 3)

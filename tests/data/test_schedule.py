"""Splits by measured times: they follow changes, starve nobody, are the same everywhere."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardjax.data import Balance, BlockSchedule
from shardjax.data.blocks import assign


def run(schedule, seconds, blocks, minibatches=1, limits=None):
    """Goes through minibatches; the counts of each."""
    found = []
    for _ in range(minibatches):
        counts = schedule.next(blocks, limits=limits)
        found.append(counts.tolist())
        schedule.observe(counts * np.asarray(seconds, float), counts)
    return found


def test_waiting_for_others_is_no_work():
    busy = np.array([4.0, 4.0, 12.0])
    waits, plain = BlockSchedule(3), BlockSchedule(3)
    waits.observe(np.full(3, 13.0), [4, 4, 4], waited=13.0 - busy)
    plain.observe(busy, [4, 4, 4])
    assert waits.speeds == plain.speeds
    plain.observe(busy + 1, [4, 4, 4], waited=1)
    assert plain.expected().tolist() == [1, 1, 3]


def test_equal_processes_have_equal_parts():
    schedule = BlockSchedule(4)
    assert run(schedule, [0.5] * 4, 16, minibatches=30) == [[4] * 4] * 30
    # jitter of less than a block does not matter
    rng = np.random.default_rng(0)
    for _ in range(30):
        counts = schedule.next(16)
        assert counts.tolist() == [4] * 4
        schedule.observe(counts * rng.uniform(0.95, 1.05, 4), counts)


def test_what_is_left_over_goes_around():
    counts = np.array(run(BlockSchedule(4), [1.0] * 4, 6, minibatches=8))
    assert counts.sum(axis=0).tolist() == [12] * 4
    # more processes than blocks
    counts = np.array(run(BlockSchedule(5), [1.0] * 5, 2, minibatches=10))
    assert counts.sum(axis=0).tolist() == [4] * 5


def test_a_process_that_was_slow_gets_its_share_back():
    schedule = BlockSchedule(4)
    run(schedule, [1.0] * 4, 32, minibatches=5)
    run(schedule, [1, 1, 1, 4.0], 32, minibatches=3)
    assert schedule.next(32)[3] == 2
    run(schedule, [1.0] * 4, 32, minibatches=2)
    assert schedule.next(32).tolist() == [8] * 4


def test_a_small_change_is_forgotten_by_half_lives():
    schedule = BlockSchedule(1, balance=Balance(half_life=3))
    for _ in range(5):
        schedule.observe([1.0], [1])
    schedule.observe([1.2], [1])
    assert 1 < schedule.expected()[0] < 1.2
    peak = schedule.expected()[0] - 1
    for _ in range(3):
        schedule.observe([1.0], [1])
    assert schedule.expected()[0] - 1 == pytest.approx(peak / 2)


def test_the_first_minibatch_counts_until_the_second():
    schedule = BlockSchedule(2)
    schedule.observe([60.0, 70.0], [4, 4])  # it compiled
    schedule.observe([53.0, 54.0], [4, 4])
    assert schedule.expected().tolist() == [53 / 4, 54 / 4]


def test_an_infinitely_slow_process_comes_back():
    schedule = BlockSchedule(4, balance=Balance(patience=20))
    run(schedule, [1.0] * 4, 16, minibatches=5)
    slow = run(schedule, [1, 1, 1, 1e9], 16, minibatches=50)
    # without blocks but for one each 20 minibatches
    assert [c[3] for c in slow] == [4, *([0] * 20 + [1]) * 2, *[0] * 7]
    back = run(schedule, [1.0] * 4, 16, minibatches=16)
    assert [c[3] for c in back[:13]] == [0] * 13
    assert [c[3] for c in back[13:]] == [1, 4, 4]


def test_trying_again_costs_a_small_part():
    schedule = BlockSchedule(4, balance=Balance(probe=0.02, patience=10_000))
    seconds = np.array([1, 1, 1, 100.0])
    counts = np.array(run(schedule, seconds, 16, minibatches=2000)[1:])
    total = (counts * seconds).max(axis=1).sum()
    without = len(counts) * (assign(16, seconds) * seconds).max()
    assert counts[:, 3].sum() == 2
    assert total < 1.025 * without


@settings(max_examples=30)
@given(st.data())
def test_nobody_starves(data):
    processes, patience = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    schedule = BlockSchedule(processes, balance=Balance(patience=patience))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(30):
        blocks = data.draw(st.integers(processes, 12))
        counts = schedule.next(blocks)
        assert counts.sum() == blocks and counts.min() >= 0
        assert (schedule.next(blocks) == counts).all()  # asking changes nothing
        schedule.observe(counts * 10 ** rng.uniform(-4, 4, processes), counts)
        assert max(schedule.speeds.idle) <= patience


def test_a_process_without_data_has_no_blocks():
    schedule = BlockSchedule(3)
    limits = [9, 0, 2]
    for counts in run(schedule, [1.0] * 3, 8, minibatches=300, limits=limits):
        assert counts == [6, 0, 2]
    assert schedule.speeds.measured == (300, 0, 300)
    # it has data again: unknown, so taken for average
    assert schedule.next(9).tolist() == [3, 3, 3]


def test_most_bounds_the_counts():
    schedule = BlockSchedule(3, most=4)
    counts = run(schedule, [1, 50.0, 50.0], 8, minibatches=20)
    assert max(map(max, counts)) == 4 and counts[1] == [4, 2, 2]
    with pytest.raises(
        ValueError, match="`blocks` of a minibatch must not exceed what 3 processes can"
    ):
        schedule.next(13)
    with pytest.raises(
        ValueError, match=r"got 8 and 6 in all: `most` is 4, `limits` 2"
    ):
        schedule.next(8, limits=2)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 20))
def test_a_state_goes_through_json_and_decides_the_same(seed, processes, minibatches):
    rng = np.random.default_rng(seed)
    one, other = BlockSchedule(processes), BlockSchedule(processes)

    def step(schedules, seconds):
        counts = [s.next(7) for s in schedules]
        assert (counts[0] == counts[-1]).all()
        for s in schedules:
            s.observe(counts[0] * seconds, counts[0])

    for _ in range(minibatches):
        step([one, other], 10 ** rng.normal(size=processes))
    again = BlockSchedule(processes)
    again.set_state(json.loads(json.dumps(one.get_state())))
    assert again.speeds == one.speeds == other.speeds
    for _ in range(5):
        step([one, again], 10 ** rng.normal(size=processes))
    assert again.speeds == one.speeds


@pytest.mark.parametrize(
    ("seconds", "blocks", "waited", "match"),
    [
        ([1.0], [1, 1], 0.0, "`seconds` must be numbers of 2 processes, one each"),
        ([1.0, -1.0], [1, 1], 0.0, "`seconds` must be finite and not negative, got -1"),
        ([1.0, np.nan], [1, 1], 0.0, "got nan of process 1. Measure it there"),
        ([1.0, np.inf], [1, 1], 0.0, "got inf of process 1. Measure it there"),
        ([1.0, 1.0], [1], 0.0, "`blocks` must be numbers of 2 processes"),
        ([1.0, 1.0], 1, 0.0, "`blocks` must be those of each of 2 processes, got 1"),
        (
            [1.0, 1.0],
            [1, -1],
            0.0,
            "`blocks` must not be negative, got -1 of process 1",
        ),
        ([1.0, 1.0], [1, 1], -1.0, "`waited` must be finite and not negative, got -1"),
        ([1.0, 0.0], [1, 4], 0.0, "got 0 and 0 of process 1 with 4 blocks. Report the"),
        ([1.0, 1.0], [1, 4], [0, 2], "must be longer than it `waited`, got 1 and 2 of"),
    ],
)
def test_observe_refuses_and_keeps_what_it_knows(seconds, blocks, waited, match):
    schedule = BlockSchedule(2)
    before = schedule.speeds
    with pytest.raises(ValueError, match=match):
        schedule.observe(seconds, blocks, waited)
    assert schedule.speeds is before
    with pytest.raises(TypeError, match="`blocks` must be integers, got"):
        schedule.observe([1.0, 1.0], [1.0, 1.0])


def test_a_minibatch_without_blocks_teaches_nothing():
    schedule = BlockSchedule(2)
    assert schedule.next(0).tolist() == [0, 0]
    schedule.observe([0.0, 0.0], [0, 0])
    assert schedule.expected().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"half_life": 0},
            "`half_life` of a Balance must lie between 0 and inf, got 0",
        ),
        ({"half_life": np.nan}, "`half_life` of a Balance must lie between .* got nan"),
        ({"jump": 1.0}, "`jump` of a Balance must lie between 1 and inf, got 1.0"),
        ({"probe": 1.0}, "`probe` .* between 0 and 1, got 1.0. The default is 0.02"),
        ({"patience": 0}, "`patience` must be at least 1, got 0"),
    ],
)
def test_balance_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        Balance(**options)


def test_schedule_refuses():
    with pytest.raises(ValueError, match="`processes` must be at least 1, got 0"):
        BlockSchedule(0)
    with pytest.raises(ValueError, match="`most` must be at least 1, got 0"):
        BlockSchedule(2, most=0)
    with pytest.raises(ValueError, match="`limits` must be numbers of 2 processes"):
        BlockSchedule(2).next(4, limits=[1, 2, 3])
    schedule, state = BlockSchedule(2), BlockSchedule(3).get_state()
    with pytest.raises(ValueError, match="`seconds` must be numbers of 2 processes"):
        schedule.set_state(state)
    with pytest.raises(ValueError, match=r"must have the names \['idle', 'measured'"):
        schedule.set_state({"seconds": [1.0, 1.0]})
    with pytest.raises(ValueError, match="`idle` must not be negative, got -1"):
        schedule.set_state(schedule.get_state() | {"idle": [0, -1]})
    with pytest.raises(ValueError, match="`minibatches` must be at least 0, got -3"):
        schedule.set_state(schedule.get_state() | {"minibatches": -3})
    assert schedule.get_state() == BlockSchedule(2).get_state()

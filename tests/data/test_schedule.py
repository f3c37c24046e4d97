"""Splits of minibatches: never a better one, by measured times, the same everywhere."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardjax.data import Balance, BlockSchedule
from shardjax.data.blocks import assign, block_ranges, check_times, masks, shares
from shardjax.mesh import make_mesh

times = st.floats(0.01, 100)
several = st.lists(times, min_size=1, max_size=8)

# --- assign ---------------------------------------------------------------------------


def ends(counts, seconds, ready):
    """When the last process that has something to do has finished."""
    found = [r + c * s for c, s, r in zip(counts, seconds, ready, strict=True) if c]
    return max(found, default=0.0)


@given(st.data())
def test_no_other_split_ends_earlier(data):
    processes = data.draw(st.integers(1, 4))
    blocks = data.draw(st.integers(0, 6))
    seconds = data.draw(st.lists(times, min_size=processes, max_size=processes))
    start = st.floats(0, 50)
    ready = data.draw(st.lists(start, min_size=processes, max_size=processes))
    low = data.draw(st.lists(st.integers(0, 1), min_size=processes, max_size=processes))
    high = data.draw(
        st.lists(st.integers(1, 6), min_size=processes, max_size=processes)
    )
    splits = [
        split
        for split in itertools.product(range(blocks + 1), repeat=processes)
        if sum(split) == blocks
        and all(a <= n <= b for a, n, b in zip(low, split, high, strict=True))
    ]
    if not splits:
        with pytest.raises(ValueError, match="`blocks` must lie between the sums"):
            assign(blocks, seconds, ready=ready, least=low, most=high)
        return
    counts = assign(blocks, seconds, ready=ready, least=low, most=high)
    assert tuple(counts.tolist()) in splits
    best = min(ends(split, seconds, ready) for split in splits)
    assert ends(counts, seconds, ready) == pytest.approx(best, rel=1e-12)


@given(several, st.integers(0, 60), st.randoms())
def test_a_faster_process_never_gets_fewer(seconds, blocks, random):
    order = random.sample(range(len(seconds)), len(seconds))
    counts = assign(blocks, seconds, order=order)
    assert counts.dtype == np.int64 and counts.sum() == blocks and counts.min() >= 0
    by_speed = counts[np.argsort(seconds)]
    for a, b in itertools.pairwise(zip(sorted(seconds), by_speed, strict=True)):
        assert a[1] >= b[1] or a[0] == b[0]


@given(st.integers(1, 9), st.integers(0, 40), times)
def test_equals_get_equal_parts(processes, blocks, seconds):
    counts = assign(blocks, [seconds] * processes)
    assert counts.max() - counts.min() <= 1
    # what is left over goes to the first of the order
    assert counts.tolist() == sorted(counts, reverse=True)
    back = assign(blocks, [seconds] * processes, order=range(processes)[::-1])
    assert back.tolist() == counts.tolist()[::-1]


def test_one_process_and_more_processes_than_blocks():
    assert assign(5, [2.0]).tolist() == [5]
    assert assign(2, [3.0, 1.0, 2.0, 1.0]).tolist() == [0, 1, 0, 1]
    assert assign(0, [3.0, 1.0]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((-1, [1.0]), {}, ValueError, "`blocks` must be at least 0, got -1"),
        ((1.5, [1.0]), {}, TypeError, "`blocks` must be an integer, got 1.5"),
        ((4, []), {}, ValueError, "`seconds` must be numbers of one or more processes"),
        ((4, 1.0), {}, ValueError, r"one each, got an array of shape \(\). Gather"),
        ((4, [1.0, 0.0]), {}, ValueError, "finite and positive, got 0.0 of process 1"),
        ((4, [np.inf]), {}, ValueError, "finite and positive, got inf of process 0"),
        ((4, [1.0, None]), {}, ValueError, "finite and positive, got nan of process 1"),
        (
            (4, [1.0]),
            {"ready": [-1.0]},
            ValueError,
            "`ready` must be finite and not neg",
        ),
        (
            (4, [1.0]),
            {"ready": [0.0] * 2},
            ValueError,
            "`ready` must be numbers of 1 pro",
        ),
        (
            (4, [1.0] * 2),
            {"least": [3, 2]},
            ValueError,
            "got 4, 5 and 8. Cut the minib",
        ),
        ((4, [1.0] * 2), {"most": 1}, ValueError, "got 4, 0 and 2. Cut the minibatch"),
        ((4, [1.0]), {"least": 3, "most": 2}, ValueError, "got 3 and 2 for process 0"),
        ((4, [1.0]), {"least": 0.5}, TypeError, "`least` must be integers, got 0.5"),
        ((4, [1.0]), {"most": [-1]}, ValueError, "`most` must not be negative, got -1"),
        ((4, [1.0]), {"most": [4, 4]}, ValueError, "`most` must be numbers of 1 proc"),
        (
            (4, [1.0] * 2),
            {"order": [0, 0]},
            ValueError,
            r"2 processes once, got \[0, 0\]",
        ),
    ],
)
def test_assign_refuses(arguments, options, error, match):
    with pytest.raises(error, match=match):
        assign(*arguments, **options)


# --- masks, ranges, shares ------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 3))
def test_masks_and_ranges_have_each_block_once(counts, more):
    mask = masks(counts, max(counts) + more)
    assert mask.dtype == bool and mask.shape == (len(counts), max(counts) + more)
    assert mask.sum(axis=1).tolist() == counts
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()  # real ones first
    assert masks(counts).shape[1] == max(counts)
    numbers = [n for r in block_ranges(counts) for n in r]
    assert numbers == list(range(sum(counts)))
    assert [len(r) for r in block_ranges(counts)] == counts


def test_shares_weigh_averages():
    examples, rng = [30, 0, 10, 7], np.random.default_rng(0)
    parts = [rng.normal(size=n) for n in examples]
    means = [part.mean() if part.size else 0.0 for part in parts]
    assert shares(examples) @ means == pytest.approx(np.concatenate(parts).mean())
    assert shares([0, 0]).tolist() == [0, 0]


def test_masks_and_shares_refuse():
    with pytest.raises(
        ValueError, match="`most` must be at least the largest count, got 1"
    ):
        masks([0, 2], 1)
    with pytest.raises(
        ValueError, match="`counts` must be numbers of one or more proc"
    ):
        block_ranges([])
    with pytest.raises(ValueError, match="`examples` must not be negative, got -1 of"):
        shares([3, -1])


def test_uneven_counts_in_one_program():
    """What the module says of SPMD: a loop of each device's own length, then a sum."""
    mesh, most, rows = make_mesh("8x1"), 4, 3
    traces = []

    def local(x, count, examples):  # [1, most, rows], [1], [1, most]
        traces.append(None)

        def body(n, carry):
            total, seen = carry
            real = jnp.arange(rows) < examples[0, n]
            return total + jnp.sum(x[0, n] * real), seen + examples[0, n]

        zero = jax.lax.pcast((jnp.float32(0), jnp.int32(0)), "data", to="varying")
        total, seen = jax.lax.fori_loop(0, count[0], body, zero)
        return jax.lax.psum(total, "data") / jax.lax.psum(seen, "data")

    spec = jax.P("data")
    mean = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec), out_specs=jax.P())
    )
    rng = np.random.default_rng(0)
    data = rng.normal(size=(16, rows)).astype(np.float32)
    sizes = np.full(16, rows, np.int32)
    sizes[-1] = 1  # the last block of an epoch
    for seconds in ([1.0] * 8, [1, 1, 1, 1, 1, 1, 1, 9], [1, 2, 3, 4, 5, 6, 7, 100]):
        counts = assign(16, seconds, most=most).astype(np.int32)
        x = np.full((8, most, rows), np.nan, np.float32)  # nobody computes padding
        examples = np.zeros((8, most), np.int32)
        for process, numbers in enumerate(block_ranges(counts)):
            x[process, : len(numbers)] = data[numbers.start : numbers.stop]
            examples[process, : len(numbers)] = sizes[numbers.start : numbers.stop]
        expected = (data.sum() - data[-1, 1:].sum()) / sizes.sum()
        assert float(mean(x, counts, examples)) == pytest.approx(expected, abs=1e-6)
    assert len(traces) == 1


# --- BlockSchedule --------------------------------------------------------------------


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


def test_check_times_returns_floats():
    assert check_times("ready", [1, 0], 2).dtype == np.float64

"""Blocks: no better split, each block once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.data.blocks import assign, block_ranges, check_times

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


# --- ranges and checks ----------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_ranges_have_each_block_once(counts):
    numbers = [n for r in block_ranges(counts) for n in r]
    assert numbers == list(range(sum(counts)))
    assert [len(r) for r in block_ranges(counts)] == counts


def test_counts_that_are_none_are_refused():
    with pytest.raises(
        ValueError, match="`counts` must be numbers of one or more proc"
    ):
        block_ranges([])
    with pytest.raises(ValueError, match="`counts` must not be negative, got -1 of"):
        block_ranges([3, -1])


def test_check_times_returns_floats():
    assert check_times("ready", [1, 0], 2).dtype == np.float64

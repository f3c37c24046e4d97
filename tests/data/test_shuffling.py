"""Shuffling and batching lose no row, double none, and can go on from any position."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.data import Batch, rebatch, shuffle
from shardjax.data.shuffling import Position, chunk_pieces, cut, shuffled_pieces
from shardjax.embed.jagged import Jagged

sizes = st.lists(st.integers(0, 20), max_size=12)


def make_chunks(sizes, bad_lines=0):
    """Chunks whose rows are numbered through, the number in each of their arrays."""
    chunks, first = [], 0
    for size in sizes:
        row = np.arange(first, first + size)
        bags = Jagged(np.repeat(row, row % 3), row % 3, np.repeat(row, row % 3))
        chunks.append(
            Batch(
                row,
                np.stack([row, -row], 1),
                row[None],
                ("id",),
                {"bag": bags},
                weights=row,
                groups=row,
                bad_lines=bad_lines,
            )
        )
        first += size
    return chunks


def check_rows(batches):
    """All arrays of each row still belong together; returns the rows' numbers."""
    rows = []
    for batch in batches:
        row = batch.labels.astype(int)
        np.testing.assert_array_equal(batch.dense, np.stack([row, -row], 1))
        np.testing.assert_array_equal(batch.fixed, row[None])
        np.testing.assert_array_equal(batch.weights, row)
        np.testing.assert_array_equal(batch.groups, row)
        bag = batch.jagged["bag"]
        np.testing.assert_array_equal(bag.lengths, row % 3)
        np.testing.assert_array_equal(bag.values, np.repeat(row, row % 3))
        np.testing.assert_array_equal(bag.weights, bag.values)
        rows += row.tolist()
    return rows


@given(sizes, st.integers(1, 30), st.integers(0, 3), st.integers(1, 9))
def test_shuffle_keeps_every_row_once(sizes, buffer_rows, seed, piece_rows):
    pieces = list(
        shuffle(make_chunks(sizes, 2), buffer_rows, seed, piece_rows=piece_rows)
    )
    assert sorted(check_rows(pieces)) == list(range(sum(sizes)))
    assert sum(piece.bad_lines for piece in pieces) == 2 * len(sizes)
    assert all(piece.size <= piece_rows for piece in pieces)


@given(sizes, st.integers(1, 30))
def test_shuffle_moves_rows_within_their_window_only(sizes, buffer_rows):
    rows = check_rows(shuffle(make_chunks(sizes), buffer_rows, seed=0))
    window, at = 0, 0
    for size in [*sizes, buffer_rows]:
        window += size
        if window >= buffer_rows:
            expected = range(at, min(at + window, sum(sizes)))
            assert sorted(rows[at : at + window]) == list(expected)
            at, window = at + window, 0


def test_shuffle_depends_on_seed_epoch_and_window_alone():
    def order(seed, epoch, piece_rows=8192):
        chunks = make_chunks([50, 50, 50, 50])
        return check_rows(shuffle(chunks, 100, seed, epoch, piece_rows=piece_rows))

    assert order(1, 0) == order(1, 0, piece_rows=7)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1)
    first, second = order(1, 0)[:100], order(1, 0)[100:]
    assert first != [row - 100 for row in second]
    assert first != sorted(first)


def test_shuffle_is_uniform():
    # Where row 0 of 5 ends up, over many seeds: each place as often, within 5 sigma.
    places = [
        check_rows(shuffle(make_chunks([5]), 5, seed)).index(0) for seed in range(2000)
    ]
    counts = np.bincount(places, minlength=5)
    assert np.abs(counts - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


def test_reading_keeps_pace_with_emitting():
    read = []

    def chunks():
        for chunk in make_chunks([10] * 20):
            read.append(chunk)
            yield chunk

    emitted = 0
    most = 0
    for piece in shuffle(chunks(), 50, seed=0, piece_rows=5):
        emitted += piece.size
        most = max(most, 10 * len(read) - emitted)
    assert emitted == 200
    assert most <= 50 + 10  # one window, and the chunk that is being read


@given(sizes, st.integers(1, 30), st.booleans())
def test_rebatch_cuts_exact_batches_in_order(sizes, batch_size, drop_last):
    batches = list(rebatch(make_chunks(sizes), batch_size, drop_last))
    whole, rest = divmod(sum(sizes), batch_size)
    expected = [batch_size] * whole + [rest] * (rest > 0 and not drop_last)
    assert [batch.size for batch in batches] == expected
    assert check_rows(batches) == list(range(sum(expected)))


def test_rebatch_carries_bad_lines_of_empty_chunks():
    batches = list(rebatch(make_chunks([0, 3, 0, 0, 2], bad_lines=1), 4))
    assert [batch.bad_lines for batch in batches] == [5, 0]


def test_rebatch_is_lazy():
    def chunks():
        yield from make_chunks([4])
        raise RuntimeError("read too far")

    assert next(rebatch(chunks(), 2)).size == 2


@given(sizes, st.integers(1, 9), st.integers(1, 30), st.booleans(), st.data())
def test_any_position_can_be_returned_to(sizes, batch_size, buffer, shuffled, data):
    chunks = make_chunks(sizes, bad_lines=3)

    def batches(start):
        rest = chunks[start.chunk :]
        if shuffled:
            pieces = shuffled_pieces(rest, buffer, 5, 1, 4, start)
        else:
            pieces = chunk_pieces(rest, start)
        return list(cut(pieces, batch_size, drop_last=False))

    everything = batches(Position())
    if everything:
        stop = data.draw(st.integers(1, len(everything)))
        resumed = batches(everything[stop - 1][1])
        rows = check_rows(batch for batch, *_ in resumed)
        assert rows == check_rows(batch for batch, *_ in everything[stop:])
        # The positions and the count of bad lines go on as if nothing had happened.
        assert [x[1:] for x in resumed] == [x[1:] for x in everything[stop:]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_position_that_is_not_there(shuffled):
    start = Position(chunk=1, row=6)
    chunks = make_chunks([5, 5])[1:]
    if shuffled:
        pieces = shuffled_pieces(chunks, 5, 0, 0, 5, start)
    else:
        pieces = chunk_pieces(chunks, start)
    with pytest.raises(ValueError, match=r"after row 6 .* chunk 1, as it has 5 rows"):
        next(pieces)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buffer_rows": 0}, "`buffer_rows` must be at least 1, got 0"),
        ({"seed": -1}, "`seed` must be at least 0, got -1"),
        ({"epoch": -1}, "`epoch` must be at least 0, got -1"),
        ({"piece_rows": 0}, "`piece_rows` must be at least 1, got 0"),
    ],
)
def test_shuffle_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        shuffle([], **({"buffer_rows": 1, "seed": 0} | arguments))


def test_counts_must_be_integers():
    with pytest.raises(TypeError, match="`seed` must be an integer, got 1.5"):
        shuffle([], 1, 1.5)
    with pytest.raises(TypeError, match="`batch_size` must be an integer, got True"):
        rebatch([], True)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        rebatch([], 0)

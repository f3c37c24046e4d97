"""A random order without a table: exact, the same again, and uniform as far as is seen."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.data import Permutation

NEIGHBOURS = [n for k in (2, 4, 6, 8, 12, 16) for n in (2**k - 1, 2**k, 2**k + 1)]


def excess(counts, expected, free):
    """How many standard deviations chi-square is above what chance gives."""
    chi = ((counts - expected) ** 2 / expected).sum()
    return (chi - free) / math.sqrt(2 * free)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 100, *NEIGHBOURS])
def test_every_row_has_one_place(rows):
    order = Permutation(rows, seed=1, epoch=2)
    found = order(np.arange(rows))
    np.testing.assert_array_equal(np.sort(found), np.arange(rows))
    np.testing.assert_array_equal(order.inverse(found), np.arange(rows))
    np.testing.assert_array_equal(order(order.inverse(found)), found)


@given(st.integers(1, 2**62), st.integers(0, 2**70), st.integers(0, 9), st.data())
def test_any_number_of_rows_can_be_turned_back(rows, seed, epoch, data):
    order = Permutation(rows, seed, epoch)
    places = np.array([data.draw(st.integers(0, rows - 1)), 0, rows - 1])
    found = order(places)
    assert found.min() >= 0 and found.max() < rows
    np.testing.assert_array_equal(order.inverse(found), places)


def test_the_same_seed_and_epoch_give_the_same_order():
    places = np.arange(1000)
    orders = [Permutation(1000, s, e)(places) for s in (0, 1) for e in (0, 1)]
    again = [Permutation(1000, s, e)(places) for s in (0, 1) for e in (0, 1)]
    np.testing.assert_array_equal(orders, again)
    assert len({tuple(order) for order in orders}) == 4
    # Written into checkpoints by its seed: it must never change.
    assert Permutation(10, 0)(np.arange(10)).tolist() == PINNED


PINNED = [5, 2, 1, 7, 6, 9, 8, 4, 3, 0]


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8, 9])
def test_each_place_of_few_rows_gets_each_row_as_often(rows):
    seeds, places = 4000, np.arange(rows)
    counts, orders = np.zeros((rows, rows)), Counter()
    for seed in range(seeds):
        order = Permutation(rows, seed)(places)
        counts[places, order] += 1
        orders[tuple(order.tolist())] += 1
    # Rows and columns of the table have fixed sums.
    chi = ((counts - seeds / rows) ** 2).sum() * (rows - 1) / seeds
    above = (chi - (rows - 1) ** 2) / math.sqrt(2 * (rows - 1) ** 2)
    assert above < 4
    if rows <= 5:
        every = [orders[p] for p in itertools.permutations(range(rows))]
        free = len(every) - 1
        assert excess(np.array(every), seeds / len(every), free) < 4


@pytest.mark.parametrize("rows", [4096, 4097, 10_000, 65_536, 100_003])
def test_places_of_many_rows_pass_chi_square(rows):
    bins, epochs = 32, 20
    places = np.arange(rows)
    cells, pairs = np.zeros((bins, bins)), np.zeros((bins, bins))
    for epoch in range(epochs):
        order = Permutation(rows, 7, epoch)(places)
        np.add.at(cells, (places * bins // rows, order * bins // rows), 1)
        np.add.at(pairs, (order[:-1] * bins // rows, order[1:] * bins // rows), 1)
    sizes = np.bincount(places * bins // rows)
    expected = epochs * np.outer(sizes, sizes) / rows
    assert abs(excess(cells, expected, (bins - 1) ** 2)) < 4
    # Rows that follow one another in the order are as far apart as by chance.
    assert abs(excess(pairs, expected * (rows - 1) / rows, bins**2 - 1)) < 4


def test_it_takes_no_memory():
    order = Permutation(2**62, seed=0)
    found = order(np.arange(1000))
    assert len(set(found.tolist())) == 1000
    assert sum(v.nbytes for v in vars(order).values() if hasattr(v, "nbytes")) < 1000


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 0), ValueError, "`rows` must be at least 0, got -1"),
        ((1, -1), ValueError, "`seed` must be at least 0, got -1"),
        ((1, 0, -1), ValueError, "`epoch` must be at least 0, got -1"),
        ((1.5, 0), TypeError, "`rows` must be an integer, got 1.5"),
        (
            (2**62 + 1, 0),
            ValueError,
            r"must be at most 2\*\*62, got 4611686018427387905",
        ),
    ],
)
def test_permutations_that_are_none(arguments, error, message):
    with pytest.raises(error, match=message):
        Permutation(*arguments)


def test_places_that_are_not_there():
    order = Permutation(5, 0)
    with pytest.raises(IndexError, match="`places` must be .* below 5, .* got 5"):
        order(np.array([0, 5]))
    with pytest.raises(IndexError, match="`rows` must be .* below 5, .* got -1"):
        order.inverse(np.array([-1, 7]))
    with pytest.raises(TypeError, match="`places` must be numbers of rows, .* float64"):
        order(np.array([0.5]))

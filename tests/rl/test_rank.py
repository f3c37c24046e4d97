import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.rl.rank import Order, rank_probabilities
from tests.rl.draws import assert_drawn


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 1.0, 1.0 + 1e-9, 2.5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 255, 256, 257, 1_000_000])
def test_ranks_are_drawn_as_said(ranks, alpha):
    order = Order(ranks)
    order.arrange(np.arange(ranks, dtype=np.int32))
    points = np.random.default_rng(2).random(500_000)
    slots, drawn = np.empty(len(points), np.int64), np.empty(len(points))
    order.draw_ranks(points, alpha, slots, drawn)
    probabilities = rank_probabilities(ranks, alpha)
    assert probabilities.sum() == pytest.approx(1, rel=1e-9)
    np.testing.assert_allclose(drawn, probabilities[slots], rtol=1e-12)
    assert_drawn(slots, probabilities)


def test_the_ends_of_the_distribution_are_the_first_and_the_last_rank():
    for alpha in (0.0, 0.7, 1.0, 3.0):
        order, points = Order(5), np.array([0.0, 1.0])
        order.arrange(np.arange(5, dtype=np.int32))
        slots, probabilities = np.empty(2, np.int64), np.empty(2)
        order.draw_ranks(points, alpha, slots, probabilities)
        assert slots.tolist() == [0, 4]


def test_probabilities_are_integrals_of_the_density():
    for alpha in (0.3, 1.0, 1.7):
        mass = [
            np.trapezoid(x**-alpha, x)
            for x in (np.linspace(r, r + 1, 10_001) for r in range(1, 8))
        ]
        np.testing.assert_allclose(
            rank_probabilities(7, alpha), np.array(mass) / sum(mass), rtol=1e-7
        )
    # No digits are lost far from 1: the ratio to the density, at the middle, is 1.
    tail = rank_probabilities(10**6, 0.7)[-1] / (10**6 + 0.5) ** -0.7
    scale = ((10**6 + 1) ** 0.3 - 1) / 0.3
    assert math.isclose(tail * scale, 1, rel_tol=1e-9)


CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40)


@given(CHANGES)
def test_an_order_has_each_slot_once(changes):
    order, model = Order(7), []
    for push, slot in changes:
        if push and slot not in model:
            order.push(np.array([slot]))
            model.insert(0, slot)
        elif not push:
            order.remove(np.array([slot]))
            if slot in model:  # the last one takes its place
                last = model[-1]
                model = [last if s == slot else s for s in model[:-1]]
        assert order.slots().tolist() == model
        assert len(order) == len(model)


def test_sorting_keeps_the_order_of_equals():
    order = Order(5)
    order.push(np.array([4, 2, 0, 3]))
    order.sort(np.array([1.0, 9.0, 5.0, 1.0, 5.0]))
    assert order.slots().tolist() == [2, 4, 3, 0]

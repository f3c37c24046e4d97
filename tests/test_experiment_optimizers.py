"""The optimizers that the programs choose by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.optimizers import (
    DENSE_OPTIMIZERS,
    DENSE_RATES,
    ROW_OPTIMIZERS,
    ROW_RATES,
    OptimConfig,
)


def first_move(config, size=1.0, steps=10, batch_size=4):
    tx = config.row_optimizer(steps, batch_size)
    rows = jnp.zeros((1, 2))
    updates, _ = tx.update(jnp.full((1, 2), size), tx.init(rows), rows)
    return np.asarray(updates)[0]


def test_every_optimizer_has_a_learning_rate():
    assert set(DENSE_RATES) == set(DENSE_OPTIMIZERS)
    assert set(ROW_RATES) == set(ROW_OPTIMIZERS)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
def test_damping_makes_the_first_step_smaller(name):
    free = OptimConfig(rows=name, rows_lr=0.1, rows_damping=0.0)
    np.testing.assert_allclose(first_move(free, 0.75), -0.1, rtol=1e-5)
    # 0.75 / sqrt(0.75 ** 2 + (4 / 4) ** 2) = 0.6
    damped = OptimConfig(rows=name, rows_lr=0.1, rows_damping=4.0)
    np.testing.assert_allclose(first_move(damped, 0.75), -0.06, rtol=1e-5)


def test_l2_draws_rows_to_zero():
    config = OptimConfig(rows="sgd", rows_lr=0.5, rows_l2=8.0)
    tx = config.row_optimizer(10, batch_size=4)
    rows = jnp.ones((1, 2))
    updates, _ = tx.update(jnp.zeros((1, 2)), tx.init(rows), rows)
    np.testing.assert_allclose(updates, -0.5 * 2.0)


@pytest.mark.parametrize(
    ("decay", "moves"), [("linear", [1, 0.5, 0]), ("none", [1] * 3)]
)
def test_rates_fall_to_zero_over_the_run_or_stay(decay, moves):
    config = OptimConfig(
        dense="sgd", rows="sgd", dense_lr=1.0, rows_lr=1.0, rows_l2=0.0, decay=decay
    )
    for tx in (config.dense_optimizer(2), config.row_optimizer(2, batch_size=1)):
        params = jnp.zeros((1, 1))
        state = tx.init(params)
        for move in moves:
            updates, state = tx.update(jnp.ones((1, 1)), state, params)
            np.testing.assert_allclose(updates, -move)


@pytest.mark.parametrize("name", ["dense_lr", "rows_lr", "rows_damping", "rows_l2"])
def test_negative_numbers_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must not be negative, got -1"):
        OptimConfig(**{name: -1.0})

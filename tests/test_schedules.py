"""Learning rates over a run, and the optimizers of networks."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.schedules import (
    OPTIMIZERS,
    RATES,
    NetworkOptimConfig,
    make_schedule,
    scaled_rate,
)


def rates(kind, steps=10, **options):
    schedule = make_schedule(kind, 2.0, steps, **options)
    return np.array([float(schedule(step)) for step in range(steps + 1)])


def test_warm_up_climbs_from_zero_to_the_rate():
    for kind in ("cosine", "linear", "constant"):
        found = rates(kind, warmup=0.4)
        np.testing.assert_allclose(found[:5], [0, 0.5, 1, 1.5, 2])
        assert found.max() == found[4] == 2


def test_rates_fall_as_their_names_say():
    np.testing.assert_allclose(rates("linear", final=0.5), np.linspace(2, 1, 11))
    cosine = 1 + np.cos(np.linspace(0, np.pi, 11))
    np.testing.assert_allclose(rates("cosine"), cosine, atol=1e-6)
    np.testing.assert_allclose(rates("constant"), np.full(11, 2.0))


def test_one_cycle_climbs_and_falls_to_almost_nothing():
    found = rates("one_cycle", steps=100)
    assert found[0] == pytest.approx(2 / 25) and found.argmax() == 30
    assert found[30] == 2 and found[100] < 1e-3
    assert (np.diff(found[:31]) > 0).all() and (np.diff(found[30:]) < 0).all()


def test_rates_grow_in_proportion_to_the_batch():
    assert scaled_rate(0.1, 1024, 256) == pytest.approx(0.4)
    config = NetworkOptimConfig(
        name="sgd", lr=0.1, base_batch_size=256, schedule="constant", warmup=0, clip=0
    )
    moves = []
    for size in (256, 1024):
        tx = config.optimizer(10, size)
        params = jnp.zeros(2)
        updates, _ = tx.update(jnp.ones(2), tx.init(params), params)
        moves.append(float(updates[0]))
    assert moves[1] == pytest.approx(4 * moves[0])


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("schedule", ["cosine", "one_cycle"])
def test_every_optimizer_goes_downhill(name, schedule):
    config = NetworkOptimConfig(name=name, schedule=schedule, weight_decay=0.01)
    tx = config.optimizer(200, 16)
    goal = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    params: Any = jnp.ones((8, 4))
    state = tx.init(params)
    before = float(jnp.sum((params - goal) ** 2))
    for _ in range(200):
        updates, state = tx.update(2 * (params - goal), state, params)
        params = optax.apply_updates(params, updates)
    assert float(jnp.sum((params - goal) ** 2)) < 0.8 * before


def test_every_optimizer_has_a_learning_rate():
    assert set(RATES) == set(OPTIMIZERS)


def test_clipping_is_by_the_norm_of_all_parameters():
    config = NetworkOptimConfig(
        name="sgd", lr=1.0, schedule="constant", warmup=0, clip=1.0
    )
    tx = config.optimizer(10, 1)
    grads = {"a": jnp.full(2, 30.0), "b": jnp.full(2, 40.0)}
    updates: Any = tx.update(grads, tx.init(grads), grads)[0]
    # nesterov momentum of 0.9: the first move is 1.9 gradients
    norm = optax.tree.norm(updates)
    np.testing.assert_allclose(norm, 1.9, rtol=1e-5)
    np.testing.assert_allclose(updates["b"][0] / updates["a"][0], 4 / 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1.0}, "`lr` must be a number of at least 0, got -1"),
        ({"clip": float("nan")}, "`clip` must be a number of at least 0, got nan"),
        ({"warmup": 1.5}, r"`warmup` must lie in \[0, 1\], got 1.5"),
        ({"final": -0.1}, r"`final` must lie in \[0, 1\], got -0.1"),
        ({"base_batch_size": 0}, "`base_batch_size` must be positive, got 0"),
    ],
)
def test_bad_configs_say_what_is_wrong(values, message):
    with pytest.raises(ValueError, match=message):
        NetworkOptimConfig(**values)


def test_bad_schedules_say_what_is_wrong():
    with pytest.raises(ValueError, match="must be one of .* got 'sawtooth'"):
        make_schedule("sawtooth", 1.0, 10)
    with pytest.raises(ValueError, match="one_cycle .* at least 4 steps, got 3"):
        make_schedule("one_cycle", 1.0, 3)

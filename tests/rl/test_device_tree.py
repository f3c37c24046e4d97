from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardjax.rl import device_tree

LEAVES, LIVE = 4096, 1000


@partial(jax.jit, static_argnums=(1, 2))
def churn(key, rounds, draws):
    """Changes all masses and draws, again and again; counts draws of leaves without."""

    def turn(levels, key):
        of_masses, of_draws = jax.random.split(key)
        masses = jnp.exp(4 * jax.random.normal(of_masses, (LIVE,)))
        levels = device_tree.set_leaves(levels, 4 * jnp.arange(LIVE) + 3, masses)
        points = device_tree.random_points(of_draws, levels, draws, stratified=False)
        leaves = device_tree.sample_leaves(levels, points)
        drawn = levels[0].reshape(-1).at[leaves].get(mode="fill", fill_value=0)
        error = jnp.abs(device_tree.total(levels) / jnp.sum(masses) - 1)
        return levels, (jnp.sum(drawn == 0), error)

    levels = device_tree.init_levels(LEAVES)
    return jax.lax.scan(turn, levels, jax.random.split(key, rounds))


def test_ten_million_draws_hit_no_leaf_without_mass():
    """Under lognormal priorities of sd 4, which change in between."""
    levels, (empty, error) = churn(jax.random.key(0), 100, 100_000)
    assert int(empty.sum()) == 0
    assert error.max() < 1e-6
    masses = np.asarray(levels[0], np.float64)
    assert float(device_tree.total(levels)) == pytest.approx(masses.sum(), rel=3e-7)


def test_rebuilding_changes_no_bit():
    rng = np.random.default_rng(0)
    for capacity in (1, 17, 257):
        levels = device_tree.init_levels(capacity)
        slots = jnp.asarray(rng.permutation(capacity)[: capacity // 2 + 1], jnp.int32)
        masses = jnp.asarray(rng.lognormal(0, 4, len(slots)), jnp.float32)
        levels = device_tree.set_leaves(levels, slots, masses)
        anew = device_tree.rebuild(levels[0])
        assert len(anew) == len(levels)
        for level, same in zip(levels, anew, strict=True):
            np.testing.assert_array_equal(level, same)


def test_slots_past_the_end_are_left_out():
    for capacity in (1, 16, 17, 257, 5000):
        levels = device_tree.init_levels(capacity)
        written = device_tree.set_leaves(
            levels, jnp.array([2**31 - 1, 0]), jnp.array([1e9, 2.0])
        )
        assert float(device_tree.total(written)) == 2.0
        assert all(float(level.sum()) == 2.0 for level in written)

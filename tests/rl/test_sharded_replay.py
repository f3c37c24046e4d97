"""A replay over a mesh axis: probabilities and weights are those of one draw from all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardjax import make_mesh, rl
from tests.rl.draws import assert_drawn

DRAWS = 80_000
PER_SHARD = 3


@pytest.fixture(params=["8x1", "4x2"])
def replay(request):
    one = rl.DeviceReplay(4, rl.Proportional(1.0, 0.0), weight_norm=None)
    return rl.ShardedReplay(one, make_mesh(request.param))


def filled(replay, key=0):
    """Three items in each shard; their priorities, [shards, 3]: very unlike each other."""
    rng = np.random.default_rng(key)
    priorities = rng.lognormal(0, 1, (replay.shards, PER_SHARD))
    priorities *= 1 + np.arange(replay.shards)[:, None]
    n = priorities.size
    add = jax.jit(replay.add)
    state, ids = add(
        replay.init({"x": jnp.int32(0)}),
        {"x": jnp.arange(n, dtype=jnp.int32)},
        jnp.asarray(priorities.reshape(-1), jnp.float32),
    )
    return state, ids, priorities


def test_draws_are_as_likely_as_said(replay):
    state, ids, priorities = filled(replay)
    expected = priorities / priorities.sum(axis=1, keepdims=True) / replay.shards
    expected = expected.reshape(-1)
    draw = jax.jit(lambda state, key, beta: replay.sample(state, key, DRAWS, beta=beta))
    batch = draw(state, jax.random.key(0), 1.0)
    assert_drawn(batch.items["x"], expected)
    x = np.asarray(batch.items["x"])
    np.testing.assert_allclose(batch.probabilities, expected[x], rtol=1e-5)
    # With the number of all items; the weighted mean is that over all items.
    weights = 1 / (expected.size * expected[x])
    np.testing.assert_allclose(batch.weights, weights, rtol=1e-5)
    values = np.sin(np.arange(expected.size))
    mean = np.mean(np.asarray(batch.weights, np.float64) * values[x])
    assert mean == pytest.approx(values.mean(), abs=0.02)
    # Each device has what it drew.
    for leaf in jax.tree.leaves((state, batch)):
        assert leaf.sharding.spec[0] == replay.axis

    # Priorities go back to where the items are; those of deleted ones do not.
    delete = jax.jit(replay.delete)
    row = jnp.arange(replay.shards) * PER_SHARD
    gone = jax.tree.map(lambda i: i[row], ids)
    state, there = delete(state, gone)
    assert there.all()
    state, applied = jax.jit(replay.set_priorities)(
        state, ids, jnp.arange(1.0, expected.size + 1)
    )
    assert applied.tolist() == [i % PER_SHARD != 0 for i in range(expected.size)]
    new = np.arange(1.0, expected.size + 1).reshape(-1, PER_SHARD)
    new[:, 0] = 0
    new /= new.sum(axis=1, keepdims=True) * replay.shards
    again = draw(state, jax.random.key(1), 0.5)
    assert_drawn(again.items["x"], new.reshape(-1))
    likely = new.reshape(-1)[np.asarray(again.items["x"])]
    weights = (replay.shards * 2 * likely) ** -0.5
    np.testing.assert_allclose(again.weights, weights, rtol=1e-5)

    # A shard without items draws nothing; the others are as many as there are.
    first = jnp.arange(replay.shards * PER_SHARD) < PER_SHARD
    empty = jax.tree.map(lambda i: jnp.where(first, i, 0), ids)
    state, _ = jax.jit(replay.delete)(state, empty)
    last = draw(state, jax.random.key(2), 1.0)
    own = DRAWS // replay.shards
    assert not last.weights[:own].any() and not last.ids.generations[:own].any()
    scale = replay.shards / (replay.shards - 1)
    likely = scale * new.reshape(-1)[np.asarray(last.items["x"])[own:]]
    np.testing.assert_allclose(last.probabilities[own:], likely, rtol=1e-5)


def test_weights_of_a_batch_are_divided_by_the_largest_of_all_shards():
    one = rl.DeviceReplay(4, rl.Proportional(1.0, 0.0))
    replay = rl.ShardedReplay(one, make_mesh("8x1"))
    state, _, priorities = filled(replay)
    batch = jax.jit(lambda s, k: replay.sample(s, k, 64, beta=1.0))(
        state, jax.random.key(0)
    )
    share = priorities / priorities.sum(axis=1, keepdims=True)
    weights = 1 / share.reshape(-1)[np.asarray(batch.items["x"])]
    np.testing.assert_allclose(batch.weights, weights / weights.max(), rtol=1e-5)


def test_wrong_arguments_are_refused():
    one = rl.DeviceReplay(4)
    with pytest.raises(ValueError, match=r"one of the mesh, \['data', 'model'\], got"):
        rl.ShardedReplay(one, make_mesh("8x1"), axis="batch")
    replay = rl.ShardedReplay(one, make_mesh("8x1"))
    state = replay.init({"x": jnp.int32(0)})
    with pytest.raises(
        ValueError, match="divisible by the 8 shards over 'data', got 9"
    ):
        replay.sample(state, jax.random.key(0), 9)

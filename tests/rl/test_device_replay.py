"""A replay on a device: what it draws, what happens to items by id, what it counts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardjax import rl
from shardjax.rl.device_replay import _once_each
from tests.rl.draws import assert_drawn

REPLAY = rl.DeviceReplay(5, rl.Proportional(alpha=1.0, eps=0.0))
EXAMPLE = {"x": jnp.int32(0)}
DRAWS = 20_000

# One program each for all tests.
add = jax.jit(REPLAY.add)
set_priorities = jax.jit(REPLAY.set_priorities)
delete = jax.jit(REPLAY.delete)
contains = jax.jit(REPLAY.contains)


@partial(jax.jit, static_argnums=0)
def draw(replay, state, key, beta=1.0):
    return replay.sample(state, jax.random.key(key), DRAWS, beta=beta)


def numbered(n, start=0):
    return {"x": jnp.arange(start, start + n, dtype=jnp.int32)}


def filled(priorities):
    return add(REPLAY.init(EXAMPLE), numbered(len(priorities)), jnp.array(priorities))


def part(ids, *rows):
    return jax.tree.map(lambda x: x[jnp.array(rows)], ids)


def assert_is(state, items):
    """The replay has these items, {x: priority}, and draws them as it should."""
    assert int(state.size) == len(items)
    there = np.asarray(state.generations) != 0
    x, raw = np.asarray(state.items["x"]), np.asarray(state.priorities)
    found = {int(x[s]): float(raw[s]) for s in range(5) if there[s]}
    assert found == pytest.approx(items)
    batch = draw(REPLAY, state, 0)
    expected = np.zeros(5)
    for slot in range(5):
        if there[slot]:
            expected[slot] = items[int(x[slot])] / sum(items.values())
    np.testing.assert_allclose(
        batch.probabilities, expected[batch.ids.slots], rtol=1e-6
    )
    np.testing.assert_array_equal(batch.items["x"], x[batch.ids.slots])
    assert bool(contains(state, batch.ids).all())
    assert_drawn(batch.ids.slots, expected)


def test_items_go_around_the_ring():
    """New ones get the largest priority of those that are there."""
    state, first = filled([1.0, 2.0, 4.0])
    assert_is(state, {0: 1, 1: 2, 2: 4})
    state, second = add(state, numbered(3, 3), jnp.array([8.0, 1.0, 2.0]))
    assert_is(state, {1: 2, 2: 4, 3: 8, 4: 1, 5: 2})
    assert contains(state, first).tolist() == [False, True, True]
    assert second.generations.tolist() == [1, 1, 2]
    state, third = jax.jit(REPLAY.add)(state, numbered(3, 6))
    assert_is(state, {4: 1, 5: 2, 6: 8, 7: 8, 8: 8})
    assert contains(state, third).all()


def test_as_many_as_fit_can_be_added_at_once():
    state, _ = filled([1.0, 2.0, 4.0])
    state, ids = add(state, numbered(5, 10), jnp.arange(1.0, 6.0))
    assert_is(state, {10 + i: 1.0 + i for i in range(5)})
    assert ids.slots.tolist() == [3, 4, 0, 1, 2]
    with pytest.raises(ValueError, match="at most 5 fit at once, got 6"):
        add(state, numbered(6), jnp.ones(6))


def test_what_is_not_valid_is_left_out():
    state, ids = jax.jit(REPLAY.add)(
        REPLAY.init(EXAMPLE),
        numbered(3),
        jnp.array([1.0, jnp.nan, 3.0]),
        jnp.array([True, False, True]),
    )
    assert_is(state, {0: 1, 2: 3})
    assert contains(state, ids).tolist() == [True, False, True]
    assert int(state.refused) == 0


def test_a_priority_of_an_item_that_is_gone_is_stale():
    state, old = filled([1.0, 2.0, 4.0])
    state, _ = add(state, numbered(3, 3), jnp.array([1.0, 1.0, 1.0]))
    state, applied = set_priorities(state, old, jnp.full(3, 100.0))
    assert applied.tolist() == [False, True, True]
    assert int(state.stale) == 1
    assert_is(state, {1: 100, 2: 100, 3: 1, 4: 1, 5: 1})


@pytest.mark.parametrize("capacity", [5, 2**30])
def test_slots_are_written_once_each(capacity):
    """By sorting one number, or two where one has not enough bits."""
    slots = jnp.array([3, 1, 2**31 - 1, 3, 0, 1, 3], jnp.int32)
    once, order = _once_each(slots, capacity)
    there = np.asarray(once) < capacity
    assert once[there].tolist() == [0, 1, 3]
    assert order[there].tolist() == [4, 5, 6]


def test_of_an_item_given_twice_the_last_priority_counts():
    state, ids = filled([1.0, 2.0, 4.0])
    twice = part(ids, 1, 2, 1)
    state, applied = set_priorities(state, twice, jnp.array([7.0, 3.0, 5.0]))
    assert applied.all()
    assert_is(state, {0: 1, 1: 5, 2: 3})


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1.0, 1e30])
def test_what_is_no_priority_is_refused_and_counted(wrong):
    state, ids = filled([1.0, 2.0, 4.0])
    state, applied = set_priorities(state, ids, jnp.array([3.0, wrong, 5.0]))
    assert applied.tolist() == [True, False, True]
    assert (int(state.refused), int(state.stale)) == (1, 0)
    assert_is(state, {0: 3, 1: 2, 2: 5})
    state, _ = add(state, numbered(3, 3), jnp.array([1.0, wrong, 1.0]))
    assert int(state.refused) == 2
    assert_is(state, {1: 2, 2: 5, 3: 1, 4: 5, 5: 1})


def test_deleted_items_are_never_drawn():
    state, ids = filled([1.0, 2.0, 4.0])
    state, there = delete(state, part(ids, 2, 0, 2))
    assert there.all()
    assert_is(state, {1: 2})
    state, there = delete(state, part(ids, 2, 0, 2))
    assert not there.any()
    state, _ = add(state, numbered(3, 3), jnp.array([1.0, 1.0, 1.0]))
    assert_is(state, {1: 2, 3: 1, 4: 1, 5: 1})


def test_generations_go_past_the_largest_integer():
    for turn in (2**31 - 2, -3):
        state = REPLAY.init(EXAMPLE)
        state = replace(state, counters=state.counters.at[1].set(turn))
        seen = []
        for start in range(0, 24, 3):
            state, ids = add(state, numbered(3, start), jnp.ones(3))
            seen.append(ids)
            there = [bool(contains(state, old).all()) for old in seen]
            assert there[-1] and not any(there[:-2])
            assert_is(state, {x: 1 for x in range(start + 3)[-5:]})
        assert not (np.array([i.generations for i in seen]) == 0).any()


def test_a_draw_from_nothing_counts_nothing():
    state = REPLAY.init(EXAMPLE)
    batch = draw(REPLAY, state, 0)
    assert not batch.weights.any() and not batch.probabilities.any()
    assert not contains(state, batch.ids).any()
    ids = part(batch.ids, 0, 1, 2)
    state, applied = set_priorities(state, ids, jnp.ones(3))
    assert not applied.any() and int(state.size) == 0
    assert float(state.masses[0].sum()) == 0


def test_without_any_priority_draws_are_uniform():
    state, _ = filled([0.0, 0.0, 0.0])
    batch = draw(REPLAY, state, 1)
    assert_drawn(batch.ids.slots, [1 / 3, 1 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(batch.weights, 1)


@pytest.mark.parametrize("norm", ["batch", "buffer", None])
def test_weights_are_those_of_the_definition(norm):
    replay = replace(REPLAY, weight_norm=norm, stratified=False)
    state, _ = filled([1.0, 2.0, 4.0])
    batch = draw(replay, state, 2, 0.5)
    everything = np.array([1, 2, 4]) / 7
    weights = (3 * everything[batch.ids.slots]) ** -0.5
    if norm is not None:  # all items are drawn, so that both are the same
        weights /= (3 * everything.min()) ** -0.5
    np.testing.assert_allclose(batch.weights, weights, rtol=1e-6)
    few = jax.jit(lambda s: replay.sample(s, jax.random.key(4), 2, beta=0.5))(state)
    weights = (3 * everything[few.ids.slots]) ** -0.5
    scale = {"batch": weights.max(), "buffer": (3 / 7) ** -0.5, None: 1}[norm]
    np.testing.assert_allclose(few.weights, weights / scale, rtol=1e-6)


def test_uniform_draws():
    replay = rl.DeviceReplay(5)
    state, ids = replay.add(replay.init(EXAMPLE), numbered(4))
    state, _ = replay.delete(state, part(ids, 1))
    batch = draw(replay, state, 0)
    assert_drawn(batch.ids.slots, [1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert (batch.weights == 1).all()
    with pytest.raises(ValueError, match="`set_priorities` got priorities, but"):
        replay.set_priorities(state, ids, jnp.ones(4))
    with pytest.raises(ValueError, match="`add` got priorities, but"):
        replay.add(state, numbered(4), jnp.ones(4))


def test_another_alpha_is_taken_up():
    state, _ = filled([1.0, 4.0, 9.0])
    root = replace(REPLAY, sampler=rl.Proportional(0.5, 0.0))
    batch = draw(root, root.rebuild(state), 0)
    assert_drawn(batch.ids.slots, np.array([1, 2, 3, 0, 0]) / 6)


def test_items_are_any_pytree():
    example = {
        "flag": jnp.bool_(False),
        "half": (jnp.zeros(3, jnp.bfloat16), jnp.zeros((2, 0))),
    }
    replay = rl.DeviceReplay(4)
    items = {
        "flag": jnp.array([True, False]),
        "half": (
            jnp.arange(6.0).reshape(2, 3).astype(jnp.bfloat16),
            jnp.zeros((2, 2, 0)),
        ),
    }
    state, ids = replay.add(replay.init(example), items)
    found, there = replay.get(state, ids)
    assert there.all()
    for x, same in zip(jax.tree.leaves(found), jax.tree.leaves(items), strict=True):
        assert x.dtype == same.dtype
        np.testing.assert_array_equal(x, same)


def test_wrong_arguments_are_refused_while_tracing():
    state = REPLAY.init(EXAMPLE)
    with pytest.raises(ValueError, match="structure of the example"):
        REPLAY.add(state, {"y": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"\['x'\] must be int32, got float32"):
        REPLAY.add(state, {"x": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"\['x'\] must be \[n\], got \[2, 3\]"):
        REPLAY.add(state, {"x": jnp.zeros((2, 3), jnp.int32)})
    with pytest.raises(ValueError, match=r"one for each item, \[2\], got \[3\]"):
        REPLAY.add(state, numbered(2), jnp.ones(3))
    with pytest.raises(ValueError, match="`capacity` must be from 1 to 126322567"):
        rl.DeviceReplay(2**27)
    with pytest.raises(ValueError, match="`width` must be at least 2, got 1"):
        rl.DeviceReplay(4, width=1)
    with pytest.raises(TypeError, match="By rank draws only `Replay`"):
        rl.DeviceReplay(4, rl.RankBased())
    with pytest.raises(ValueError, match="`uniform_prob` of Proportional must be 0"):
        rl.DeviceReplay(4, rl.Proportional(uniform_prob=0.1))
    with pytest.raises(ValueError, match='"batch", "buffer" or None, got 5'):
        rl.DeviceReplay(4, weight_norm=5)

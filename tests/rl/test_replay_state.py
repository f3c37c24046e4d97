"""States of replays: what goes on from them is the same, bit for bit."""

import tracemalloc

import numpy as np
import pytest

from shardjax import rl

EXAMPLE = {"x": np.int64(0), "big": np.zeros(100, np.float32)}
SAMPLERS = {
    "uniform": rl.Uniform(),
    "proportional": rl.Proportional(0.6, uniform_prob=0.1),
    "rank": rl.RankBased(0.7, refresh=50),
}


def items(n, start=0):
    x = np.arange(start, start + n)
    return {"x": x, "big": np.repeat(x[:, None], 100, 1) / np.float32(1)}


def copied(state):
    return {
        k: {n: np.array(a) for n, a in v.items()} if k == "items" else np.array(v)
        for k, v in state.items()
    }


def go_on(replay, sampler):
    """Draws, priorities and items of some more steps; what came of them."""
    seen = []
    for t in range(20):
        batch = replay.sample(16, groups=2, beta=0.5)
        seen += [*batch.items.values(), *batch[1:]]
        if sampler != rl.Uniform():
            replay.set_priorities(batch.ids, 1 + np.sin(batch.ids + t))
        seen.append(replay.add(items(3, 1000 + 3 * t)))
    return seen


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("added", [0, 7, 64, 150])
def test_a_state_goes_on_where_it_was_taken(name, added):
    sampler = SAMPLERS[name]
    replay = rl.Replay(EXAMPLE, 64, sampler, first_id=2**63 - 50, seed=3)
    ids = replay.add(items(5))
    for start in range(0, added, 10):
        ids = replay.add(items(min(10, added - start), 100 + start))
        replay.sample(8)
    replay.delete(ids[1:3])
    state = copied(replay.state_dict())
    assert all(
        isinstance(a, np.ndarray) and a.dtype.kind in "uif"
        for v in state.values()
        for a in (v.values() if isinstance(v, dict) else [v])
    )
    expected = go_on(replay, sampler)
    resumed = rl.Replay(EXAMPLE, 64, sampler, seed=99)
    resumed.add(items(40, 7))  # whatever it held before
    resumed.load_state_dict(state)
    assert resumed.contains(ids).tolist() == [i not in (1, 2) for i in range(len(ids))]
    for x, same in zip(go_on(resumed, sampler), expected, strict=True):
        np.testing.assert_array_equal(x, same)
    assert resumed.stats() == replay.stats()


def test_a_state_takes_another_alpha():
    """Priorities are kept as they were given, so that nothing has to be inverted."""
    first = rl.Replay(EXAMPLE, 8, rl.Proportional(0.5, 0.0))
    first.add(items(3), [1.0, 4.0, 9.0])
    second = rl.Replay(EXAMPLE, 8, rl.Proportional(1.0, 0.0))
    second.load_state_dict(first.state_dict())
    drawn = np.unique(second.sample(200).probabilities)
    np.testing.assert_allclose(drawn, np.array([1, 4, 9]) / 14)


def test_no_second_copy_of_the_items_is_made():
    """dreamerv3 #103, tianshou #260."""
    replay, other = (rl.Replay(EXAMPLE, 20_000, rl.Proportional()) for _ in "ab")
    replay.add(items(20_000))
    held = 20_000 * 408
    tracemalloc.start()
    try:
        state = replay.state_dict()
        other.load_state_dict(state)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.4 * held
    assert not state["items"]["big"].flags.writeable
    assert state["items"]["big"].flags.c_contiguous


def test_other_states_are_refused():
    replay = rl.Replay(EXAMPLE, 8)
    ids = replay.add(items(3))
    state = replay.state_dict()
    with pytest.raises(ValueError, match="of capacity 8, and this one has 9"):
        rl.Replay(EXAMPLE, 9).load_state_dict(state)
    with pytest.raises(ValueError, match="The state has no priorities"):
        rl.Replay(EXAMPLE, 8, rl.Proportional()).load_state_dict(state)
    with pytest.raises(ValueError, match=r"\['x'\] must be float64, got int64"):
        rl.Replay({**EXAMPLE, "x": 0.0}, 8).load_state_dict(state)
    with pytest.raises(ValueError, match=r"\['x'\] must be int32, got int64"):
        rl.Replay({**EXAMPLE, "x": np.int32(0)}, 8).load_state_dict(state)
    with_priorities = rl.Replay(EXAMPLE, 8, rl.Proportional())
    with_priorities.add(items(3))
    state = with_priorities.state_dict()
    state["priorities"][1] = np.nan
    with pytest.raises(ValueError, match="`load_state_dict` must be finite"):
        with_priorities.load_state_dict(state)
    assert replay.contains(ids).all()

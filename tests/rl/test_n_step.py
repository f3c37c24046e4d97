"""Items of n steps against a brute force over whole episodes."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardjax import rl

GOES_ON, TERMINATED, TRUNCATED, RESET = range(4)


def step(envs, **changes):
    zeros = np.zeros(envs)
    given = {
        "obs": zeros,
        "action": zeros,
        "reward": zeros,
        "next_obs": zeros,
        "terminated": zeros > 0,
        "truncated": zeros > 0,
    }
    return given | changes


def brute_force(steps, n, discount):
    """Of one environment: steps (obs, action, reward, next_obs, kind) to items, by obs.

    Reads each episode from each of its steps on to the n-th after it, or its end.
    """
    items = {}
    steps = [s for s in steps if s[4] != RESET]
    for first, (obs, action, *_) in enumerate(steps):
        total, m, ended = 0.0, 0, False
        for _, _, reward, next_obs, kind in steps[first : first + n]:
            total += discount**m * reward
            m, last, ended = m + 1, next_obs, kind != GOES_ON
            if ended:
                break
        if m == n or ended:
            terminal = kind == TERMINATED
            items[obs] = (action, total, 0.0 if terminal else discount**m, last)
    return items


@given(
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=25),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_items_are_those_of_brute_force(n, kinds, random):
    """Of three environments whose episodes end in both ways, or are reset in between."""
    envs, discount = 3, 0.9
    n_step = rl.NStep(n=n, discount=discount, num_envs=envs)
    steps, items = [[] for _ in range(envs)], [{} for _ in range(envs)]
    for t, kind in enumerate(kinds):
        kind = np.array(kind)
        obs = np.array([1000.0 * e + t for e in range(envs)])
        final = obs + 0.5  # of no other step: a reset obs would be another
        action, reward = np.array(
            [[random.randint(0, 99) for _ in "abc"] for _ in "ar"]
        )
        made = n_step.add(
            obs={"id": obs.copy()},
            action=action,
            reward=reward.astype(np.float64),
            next_obs={"id": final},
            terminated=kind == TERMINATED,
            truncated=(kind == TRUNCATED) | (kind == TERMINATED) & (action > 50),
            valid=kind != RESET,
        )
        for e in range(envs):
            steps[e].append((obs[e], action[e], reward[e], final[e], kind[e]))
        columns = made["obs_tm1"]["id"], made["a_tm1"], made["r_t"], made["discount_t"]
        for o, *rest in zip(*columns, made["obs_t"]["id"], strict=True):
            of_env = items[int(o) // 1000]
            assert o not in of_env, "an item was made twice"
            of_env[o] = rest
        obs[:], final[:] = -1, -1  # items share no memory with what was given
    for e in range(envs):
        expected = brute_force(steps[e], n, discount)
        assert items[e].keys() == expected.keys()
        for o, item in items[e].items():
            np.testing.assert_allclose(item, expected[o], rtol=1e-6)


@pytest.mark.parametrize(
    ("end", "discounts"),
    [("terminated", [0.125, 0, 0, 0]), ("truncated", [0.125, 0.125, 0.25, 0.5])],
)
def test_tails_of_an_episode(end, discounts):
    """The last n - 1 observations have items, with the discount of their own length
    (FastTD3 #6) and the final observation (cleanrl #460)."""
    n_step, items = rl.NStep(n=3, discount=0.5, num_envs=1), []
    for t in range(4):
        at = np.array([float(t)])
        ended = {end: [t == 3]}
        made = n_step.add(
            **step(1, obs=at, action=at, reward=at + 1, next_obs=at + 1, **ended)
        )
        items.append({k: v.tolist() for k, v in made.items()})
    assert items[0]["r_t"] == items[1]["r_t"] == []
    last = {k: items[2][k] + items[3][k] for k in items[2]}
    assert last == {
        "obs_tm1": [0, 1, 2, 3],
        "a_tm1": [0, 1, 2, 3],
        "r_t": [1 + 1 + 0.75, 2 + 1.5 + 1, 3 + 2, 4],
        "discount_t": discounts,
        "obs_t": [3, 4, 4, 4],
    }
    after = n_step.add(**step(1, terminated=[True]))
    assert after["r_t"].tolist() == [0]  # of the new episode alone


def test_one_step_items_are_the_steps():
    n_step = rl.NStep(n=1, discount=0.9, num_envs=2)
    obs = np.array([1.0, 2.0])
    made = n_step.add(**step(2, obs=obs, reward=obs, next_obs=obs + 5))
    assert made["obs_t"].tolist() == [6, 7]
    assert made["r_t"].tolist() == [1, 2]
    np.testing.assert_allclose(made["discount_t"], 0.9)
    assert made["discount_t"].dtype == np.float32


def test_items_go_into_a_replay_as_they_are():
    example = {
        "obs_tm1": np.zeros(4, np.float32),
        "a_tm1": np.int32(0),
        "r_t": np.float32(0),
        "discount_t": np.float32(0),
        "obs_t": np.zeros(4, np.float32),
    }
    replay = rl.Replay(example, 100)
    n_step = rl.NStep(n=3, discount=0.99, num_envs=8)
    obs = np.ones((8, 4), np.float32)
    for _ in range(5):
        whole = step(8, obs=obs, next_obs=obs, action=np.zeros(8, np.int32))
        replay.add(n_step.add(**whole | {"reward": np.ones(8, np.int32)}))
    assert len(replay) == 24
    np.testing.assert_allclose(replay.sample(4).items["r_t"], 1 + 0.99 + 0.99**2)


def test_flush_ends_episodes_as_truncated():
    n_step = rl.NStep(n=3, discount=0.5, num_envs=2)
    with pytest.raises(RuntimeError, match="Nothing to flush"):
        n_step.flush()
    for t in range(2):
        at = np.array([t, 10.0 + t])
        valid = np.array([True, t == 0])
        n_step.add(**step(2, obs=at, reward=at, next_obs=at + 1, valid=valid))
    made = n_step.flush()
    assert made["obs_tm1"].tolist() == [0, 1, 10]
    assert made["r_t"].tolist() == [0.5, 1, 10]
    assert made["discount_t"].tolist() == [0.25, 0.5, 0.5]
    assert made["obs_t"].tolist() == [2, 2, 11]
    assert n_step.flush()["r_t"].tolist() == []


def test_a_state_goes_on_where_it_was_taken():
    def run(n_step, start, stop):
        made = []
        for t in range(start, stop):
            at = np.array([t, 10.0 + t])
            ends = np.array([t % 4 == 3, t % 3 == 2])
            whole = step(2, obs=at, reward=at, next_obs=at + 1, truncated=ends)
            made.append(n_step.add(**whole))
        return made

    whole, begun = (rl.NStep(n=3, discount=0.5, num_envs=2) for _ in "ab")
    expected = run(whole, 0, 10)[5:]
    run(begun, 0, 5)
    state = begun.state_dict()
    run(begun, 5, 8)  # the state is a copy
    resumed = rl.NStep(n=3, discount=0.5, num_envs=2)
    resumed.load_state_dict(state)
    for made, same in zip(run(resumed, 5, 10), expected, strict=True):
        for name in made:
            np.testing.assert_array_equal(made[name], same[name])
    with pytest.raises(ValueError, match=r"environments and steps, \[2, 4\], got 2"):
        rl.NStep(n=4, discount=0.5, num_envs=2).load_state_dict(state)


def test_steps_are_checked():
    with pytest.raises(ValueError, match="`n` and `num_envs` must be at least 1"):
        rl.NStep(n=0, discount=0.9, num_envs=1)
    with pytest.raises(ValueError, match="`discount` must be from 0 to 1, got 1.5"):
        rl.NStep(n=1, discount=1.5, num_envs=1)
    n_step = rl.NStep(n=2, discount=0.9, num_envs=2)
    with pytest.raises(ValueError, match=r"num_envs, 2 .*reward \[3\]"):
        n_step.add(**step(2, reward=np.zeros(3)))
    with pytest.raises(ValueError, match=r"terminated \[2, 1\]"):
        n_step.add(**step(2, terminated=np.zeros((2, 1))))
    with pytest.raises(ValueError, match="`next_obs` must have the shapes and dtypes"):
        n_step.add(**step(2, next_obs=np.zeros(2, np.float32)))
    n_step.add(**step(2))
    with pytest.raises(ValueError, match="of the first one"):
        n_step.add(**step(2, action=np.zeros((2, 3))))

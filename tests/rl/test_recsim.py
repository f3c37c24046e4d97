"""The simulated recommender: deterministic, its ends kept apart, and planning pays."""

import jax
import numpy as np
import pytest

from shardjax.rl.recsim import Behaviour, RecSim


@pytest.fixture(scope="module")
def world():
    """As large as it is by default; tests reset it."""
    return RecSim(256)


def play(sim, policy, steps=60, seed=5):
    """Steps of a policy, and returns and lengths of the sessions that ended in them."""
    rng = np.random.default_rng(1)
    sim.reset(seed=seed)
    returns, ended, found = np.zeros(sim.num_envs), [], []
    for _ in range(steps):
        step = sim.step(policy(sim, rng))
        found.append(step)
        returns += step.reward
        ended += returns[step.done].tolist()
        returns[step.done] = 0
    return found, float(np.mean(ended))


def test_the_same_seeds_and_actions_give_the_same_steps():
    worlds = [RecSim(8, users=500, items=500, seed=3) for _ in range(2)]
    steps = [play(w, lambda s, r: s.random(r), 30)[0] for w in worlds]
    for one, other in zip(*steps, strict=True):
        for x, y in zip(*map(_leaves, (one, other)), strict=True):
            np.testing.assert_array_equal(x, y)
    first = worlds[0].reset(seed=5)
    assert any(
        (x != y).any()
        for x, y in zip(*map(_leaves, (first, worlds[0].reset(seed=6))), strict=True)
    )
    other = RecSim(8, users=500, items=500, seed=4)
    changed = play(other, lambda s, r: s.random(r), 30)[0]
    assert any(
        (a.reward != b.reward).any() for a, b in zip(changed, steps[0], strict=True)
    )


def _leaves(step):
    return jax.tree.leaves(vars(step) if not isinstance(step, dict) else step)


def test_observations_are_what_they_promise(world):
    obs = world.reset(seed=0)
    assert (
        obs["user"].dtype
        == obs["candidates"].dtype
        == obs["history"].dtype
        == np.uint64
    )
    assert obs["candidates"].shape == (256, 10) and obs["history"].shape == (256, 10)
    assert (obs["history"] == 0).all() and (obs["history_length"] == 0).all()
    # ids are 64 bits wide: their lower halves alone are others
    ids = np.concatenate([world._item_ids, world._user_ids])
    assert len(np.unique(ids)) == 200_000 and (ids != 0).all()
    assert (ids >> np.uint64(32)).astype(float).mean() > 2**30
    actions = world.best()
    step = world.step(actions)
    chosen = obs["candidates"][np.arange(256), actions]
    np.testing.assert_array_equal(step.next_obs["history"][:, 0], chosen)
    np.testing.assert_array_equal(step.next_obs["clicked"][:, 0], step.reward == 1)
    assert (step.next_obs["history_length"] == 1).all()
    assert (step.next_obs["user"] == obs["user"]).all()


def test_sessions_end_by_themselves_or_are_cut_at_the_horizon(world):
    steps, _ = play(world, lambda s, r: s.random(r), 45)
    age = np.zeros(256, int)
    for step in steps:
        age += 1
        assert not (step.terminated & step.truncated).any() and step.valid.all()
        np.testing.assert_array_equal(step.truncated, ~step.terminated & (age == 20))
        np.testing.assert_array_equal(step.next_obs["step"], age)
        for name, x in step.obs.items():  # where it goes on, it goes on from there
            same = (x == step.next_obs[name]).reshape(256, -1).all(1)
            assert same[~step.done].all(), name
        age[step.done] = 0
        np.testing.assert_array_equal(step.obs["step"], age)
    ends = np.sum([[s.terminated.sum(), s.truncated.sum()] for s in steps], axis=0)
    assert (ends > 50).all()


def test_arrays_are_the_receivers_own():
    sim = RecSim(4, users=50, items=50)
    step = sim.step(np.zeros(4, int))
    state = sim.state_dict()
    for x in _leaves(step):
        x[...] = 0
    for name, x in sim.state_dict().items():
        if name != "rng":
            np.testing.assert_array_equal(x, state[name])


def test_ids_are_zipf(world):
    users, shown = [], []
    for step in play(world, lambda s, r: s.random(r), 40)[0]:
        users += step.obs["user"][step.done].tolist()
        shown.append(step.obs["candidates"].ravel())
    counts = np.unique(np.concatenate(shown), return_counts=True)[1]
    # half of the candidates are popular, and of those 8 % are the most popular item
    assert 0.02 < counts.max() / counts.sum() < 0.08
    assert (counts == 1).mean() > 0.5
    top = np.unique(users, return_counts=True)[1].max() / len(users)
    assert 0.04 < top < 0.16


def test_planning_pays(world):
    policies = {
        "random": lambda s, r: s.random(r),
        "popular": lambda s, r: s.popularity(),
        "myopic": lambda s, r: s.best(),
        "planned": lambda s, r: s.best(weight=2.0),
    }
    found = {name: play(world, policy)[1] for name, policy in policies.items()}
    assert found["random"] * 1.05 < found["popular"]
    assert found["popular"] * 1.2 < found["myopic"]
    assert found["myopic"] * 1.2 < found["planned"]


def test_the_myopic_best_has_the_most_clicks_at_once(world):
    def first(policy):
        clicks = 0.0
        for seed in range(20):
            world.reset(seed=seed)
            clicks += world.step(policy()).reward.mean()
        return clicks / 20

    assert first(world.best) > first(lambda: world.best(weight=2.0)) + 0.02


def test_tastes_drift_with_clicks_and_come_back():
    still = RecSim(64, users=100, items=100, behaviour=Behaviour(drift=0.0))
    moving = RecSim(64, users=100, items=100, behaviour=Behaviour(drift=0.3))
    distances = []
    for sim in (still, moving):
        sim.reset(seed=0)
        for _ in range(5):
            sim.step(sim.best())
        tastes = sim._tastes[sim._user]
        distances.append(1 - np.einsum("nd,nd->n", sim._mind, tastes).mean())
    assert distances[1] > 3 * distances[0] > 0


def test_sessions_go_on_from_a_state():
    sim = RecSim(16, users=200, items=200)
    for _ in range(7):
        sim.step(sim.popularity())
    state = sim.state_dict()
    wanted = [sim.step(sim.best()) for _ in range(20)]
    other = RecSim(16, users=200, items=200)
    obs = other.load_state_dict(state)
    np.testing.assert_array_equal(obs["step"], state["steps"])
    for step in wanted:
        for x, y in zip(*map(_leaves, (step, other.step(other.best()))), strict=True):
            np.testing.assert_array_equal(x, y)


def test_wrong_sizes_and_actions_are_refused():
    with pytest.raises(ValueError, match="`slate` must be positive, got 0"):
        RecSim(4, slate=0)
    with pytest.raises(ValueError, match="`zipf` must not be negative, got -1"):
        RecSim(4, zipf=-1)
    sim = RecSim(4, users=50, items=50)
    for wrong in (np.zeros(3, int), np.full(4, 10), np.full(4, -1), np.zeros(4)):
        with pytest.raises(ValueError, match=r"4 integers in \[0, 10\), got"):
            sim.step(wrong)

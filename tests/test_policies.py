"""Playing episodes, and the policies to compare with."""

import numpy as np

from experiments.policies import play, references
from shardjax import rl


class Counting:
    """Episodes of 1, 2, 3, ... steps, each of which earns its action."""

    def __init__(self, num_envs):
        self.num_envs, self.num_actions = num_envs, 5

    def reset(self, seed=None):
        self.steps = np.zeros(self.num_envs, np.int32)
        return self.steps.copy()

    def step(self, actions):
        self.steps += 1
        done = self.steps % (1 + np.arange(self.num_envs)) == 0
        obs, never = self.steps.copy(), np.zeros(self.num_envs, bool)
        reward = actions.astype(np.float32)
        return rl.EnvStep(obs, obs, reward, done, never, ~never)


def test_a_return_is_of_the_first_episode_alone():
    returns = play(Counting(4), lambda obs: obs + 1, seed=0)
    np.testing.assert_array_equal(returns, [1, 1 + 2, 1 + 2 + 3, 1 + 2 + 3 + 4])


def test_the_references_are_of_a_recommender():
    assert references(Counting(4), seed=0) == {}
    envs = rl.RecSim(1000, users=300, items=300)
    found = references(envs, seed=3)
    assert found == references(envs, seed=3) != references(envs, seed=4)
    names = ("random", "popularity", "myopic_best", "planning_best")
    assert tuple(found) == tuple(f"eval/{name}" for name in names)
    assert sorted(found.values()) == list(found.values())
    assert found["eval/popularity"] == play(envs, lambda _: envs.popularity(), 3).mean()

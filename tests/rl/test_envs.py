"""Whatever environments do at the end of an episode, the same transitions come out."""

import builtins

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from shardjax import rl

MODES = list(AutoresetMode)


class Counting:
    """Two environments whose observations are (100 * episode + time, environment).

    The first terminates after 2 steps, the second is truncated after 3. They write into one
    array, as fast environments do.
    """

    num_envs, single_action_space = 2, gymnasium.spaces.Discrete(5)

    def __init__(self, mode):
        self.metadata = {"autoreset_mode": mode}
        self._obs = np.zeros((2, 2), np.float32)
        self._resets = []

    def _observe(self):
        self._obs[:, 0] = 100 * self._episode + self._time
        self._obs[:, 1] = [0, 1]
        return self._obs

    def reset(self, *, seed=None, options=None):
        if options is None:
            self._episode, self._time = np.zeros(2, int), np.zeros(2, int)
            self._ended = np.zeros(2, bool)
        else:
            self._begin(options["reset_mask"])
        return self._observe(), {}

    def _begin(self, where):
        self._episode[where] += 1
        self._time[where] = 0
        self._ended = self._ended & ~where

    def step(self, actions):
        mode, info = self.metadata["autoreset_mode"], {}
        begins = self._ended if mode == AutoresetMode.NEXT_STEP else np.zeros(2, bool)
        assert not self._ended[~begins].any(), "a step after the end"
        self._time += 1
        reward = np.where(begins, 0, 1.0 + actions)
        self._begin(begins)
        terminated, truncated = self._time == [2, 9], self._time == [9, 3]
        self._ended = terminated | truncated
        if mode == AutoresetMode.SAME_STEP and self._ended.any():
            last = self._observe()
            final = np.array([None, None])
            for number in np.flatnonzero(self._ended):
                final[number] = last[number].copy()
            info = {"final_obs": final, "_final_obs": self._ended.copy()}
            self._begin(self._ended.copy())
        return self._observe(), reward, terminated, truncated, info

    def close(self):
        pass


def transitions(envs, actions, seed=0):
    """Per environment (obs, action, reward, next_obs, terminated, truncated) of each step;
    the actions are those of its steps, so that no mode has another sequence."""
    obs = envs.reset(seed=seed)
    taken, found = np.zeros(envs.num_envs, int), [[] for _ in range(envs.num_envs)]
    everyone = np.arange(envs.num_envs)
    while taken.min() < len(actions):
        number = np.minimum(taken, len(actions) - 1)
        action = actions[number, everyone]
        step = envs.step(action)
        for i in np.flatnonzero(step.valid & (taken < len(actions))):
            found[i].append(
                [
                    jax.tree.map(lambda x: x[i].tolist(), obs),  # noqa: B023
                    int(action[i]),
                    float(step.reward[i]),
                    jax.tree.map(lambda x: x[i].tolist(), step.next_obs),  # noqa: B023
                    bool(step.terminated[i]),
                    bool(step.truncated[i]),
                ]
            )
        taken += step.valid
        obs = step.obs
    return found


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_golden_transitions(mode):
    envs = rl.GymnasiumEnvs(Counting(mode))
    assert envs.mode == mode.value and envs.num_actions == 5
    actions = np.array([[k % 5, (k + 1) % 5] for k in range(5)])
    first, second = transitions(envs, actions)
    assert first == [
        [[0, 0], 0, 1, [1, 0], False, False],
        [[1, 0], 1, 2, [2, 0], True, False],
        [[100, 0], 2, 3, [101, 0], False, False],
        [[101, 0], 3, 4, [102, 0], True, False],
        [[200, 0], 4, 5, [201, 0], False, False],
    ]
    assert second == [
        [[0, 1], 1, 2, [1, 1], False, False],
        [[1, 1], 2, 3, [2, 1], False, False],
        [[2, 1], 3, 4, [3, 1], False, True],
        [[100, 1], 4, 5, [101, 1], False, False],
        [[101, 1], 0, 1, [102, 1], False, False],
    ]


def test_the_step_that_only_begins_an_episode_is_not_valid():
    envs = rl.GymnasiumEnvs(Counting(AutoresetMode.NEXT_STEP))
    envs.reset()
    steps = [envs.step(np.array([0, 0])) for _ in range(4)]
    assert [step.valid.tolist() for step in steps] == [
        [True, True],
        [True, True],
        [False, True],
        [True, False],
    ]
    assert [step.done.tolist() for step in steps[1:3]] == [[True, False], [False, True]]
    envs.reset()
    assert envs.step(np.array([0, 0])).valid.all()  # a reset forgets what was to begin


def test_arrays_are_the_receivers_own():
    # those of ray #18358 shared memory, and observations moved under the learner
    envs = rl.GymnasiumEnvs(Counting(AutoresetMode.NEXT_STEP))
    obs = envs.reset()
    step = envs.step(np.array([0, 0]))
    kept = step.obs.copy(), step.next_obs.copy()
    assert obs[0, 0] == 0
    envs.step(np.array([0, 0]))
    step.obs[:] = -1
    assert step.next_obs.tolist() == kept[1].tolist() and kept[0][0, 0] == 1


def cartpoles(mode, **options):
    envs = rl.make_gymnasium(
        "CartPole-v1",
        3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        **options,
    )
    actions = np.random.default_rng(0).integers(2, size=(60, 3))
    return transitions(envs, actions, seed=5)


def test_cartpole_gives_the_same_transitions_in_every_mode():
    found = [cartpoles(mode, max_episode_steps=14) for mode in MODES]
    assert found[0] == found[1] == found[2]
    ends = [step[4:] for env in found[0] for step in env]
    assert [True, False] in ends and [False, True] in ends
    for steps in found[0]:
        for step, following in zip(steps[:-1], steps[1:], strict=True):
            begins = step[4] or step[5]
            assert (step[3] != following[0]) == begins
            if begins:  # within the bounds of a first observation
                assert max(map(abs, following[0])) <= 0.05


class Pair(gymnasium.Env):
    """Observations that are a dict, of which one part is a dict; 2 steps."""

    observation_space = gymnasium.spaces.Dict(
        a=gymnasium.spaces.Box(0, 9, (2,)),
        b=gymnasium.spaces.Dict(c=gymnasium.spaces.Discrete(9)),
    )
    action_space = gymnasium.spaces.Discrete(2)

    def _observe(self):
        return {"a": np.full(2, self._time, np.float32), "b": {"c": self._time}}

    def reset(self, *, seed=None, options=None):
        self._time = 0
        return self._observe(), {}

    def step(self, action):
        self._time += 1
        return self._observe(), 1.0, self._time == 2, False, {}


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_observations_may_be_dicts(mode):
    envs = gymnasium.vector.SyncVectorEnv([Pair, Pair], autoreset_mode=mode)
    (steps, _) = transitions(rl.GymnasiumEnvs(envs), np.zeros((3, 2), int))
    assert [(s[0]["b"]["c"], s[3]["b"]["c"], s[3]["a"][0]) for s in steps] == [
        (0, 1, 1),
        (1, 2, 2),
        (0, 1, 1),
    ]


def test_unknown_modes_and_actions_are_refused():
    with pytest.raises(
        ValueError, match="Counting.*NextStep, SameStep, Disabled, got 'L"
    ):
        rl.GymnasiumEnvs(Counting("Later"))
    envs = Counting(None)
    with pytest.raises(ValueError, match="does not say how it begins episodes anew"):
        rl.GymnasiumEnvs(envs)
    del envs.metadata
    with pytest.raises(ValueError, match="of Gymnasium 1.1 and later"):
        rl.GymnasiumEnvs(envs)
    with pytest.raises(TypeError, match="numbered, a Discrete space, got Box"):
        rl.make_gymnasium("Pendulum-v1", 1)
    envs = Counting("NextStep")
    envs.single_action_space = gymnasium.spaces.Discrete(3, start=1)
    with pytest.raises(ValueError, match="numbered from 0, got Discrete"):
        rl.GymnasiumEnvs(envs)
    with pytest.raises(ValueError, match="knows no environment 'Nowhere-v7'"):
        rl.make_gymnasium("Nowhere-v7", 1)


def test_last_observations_that_are_missing_are_refused():
    class Silent(Counting):
        def step(self, actions):
            return *super().step(actions)[:4], {"final_observation": 1}

    envs = rl.GymnasiumEnvs(Silent(AutoresetMode.SAME_STEP))
    envs.reset()
    envs.step(np.array([0, 0]))
    with pytest.raises(ValueError, match=r"info\['final_obs'\], got \['final_observ"):
        envs.step(np.array([0, 0]))


def test_without_gymnasium_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("gymnasium"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'shardjax\[rl\]'"):
        rl.make_gymnasium("CartPole-v1", 1)

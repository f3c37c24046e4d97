"""Environments, several at once, whatever they do at the end of an episode.

Environments of a vector begin anew one by one, and how differs (Gymnasium calls it the
autoreset mode). For each of them `EnvStep` says the same:

============ ======================================= ==================================
mode         what `step` returns at an end           what the adapter makes of it
============ ======================================= ==================================
`NextStep`   the last observation; the next call     the observation is final; the next
             ignores the action and returns the      step is not `valid` there
             first observation of a new episode
`SameStep`   the first observation of the new        `next_obs` is `info["final_obs"]`
             episode, the last one is in `info`
`Disabled`   the last observation                    it is final; the adapter resets
                                                     those environments at once
============ ======================================= ==================================

Code that takes one mode for another learns from the step between two episodes (cleanrl #499)
or from the wrong last observation (stable-baselines3 #934).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import PyTree


@dataclass(frozen=True)
class EnvStep:
    """What has happened in each environment. Arrays are the receiver's to keep.

    Attributes:
      obs: what to choose the next action by: at the end of an episode, where the adapter
        can, of the next one. Arrays [envs, ...].
      next_obs: what came of the action, at the end of an episode the last observation in it.
      reward: float32 [envs].
      terminated: bool [envs], the episode has ended, and nothing comes after it.
      truncated: bool [envs], the episode was cut, and something would have come.
      valid: bool [envs], False where the action was ignored and a new episode began: not a
        step at all.
    """

    obs: PyTree
    next_obs: PyTree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray

    @property
    def done(self) -> np.ndarray:
        """bool [envs], the episode has ended, one way or the other."""
        return self.terminated | self.truncated


class VectorEnv(Protocol):
    """Protocol of environments that take their steps together.

    Attributes:
      num_envs: how many.
      num_actions: an action is a number below it.
    """

    num_envs: int
    num_actions: int

    def reset(self, seed: int | None = None) -> PyTree:
        """Begins an episode in each, and returns the observations, [envs, ...]."""
        ...

    def step(self, actions: np.ndarray) -> EnvStep:
        """Takes an action in each, integers [envs]."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class GymnasiumEnvs:
    """A vector environment of Gymnasium 1.1 or later, in any autoreset mode.

    Args:
      envs: a `gymnasium.vector.VectorEnv` with discrete actions.

    Attributes:
      num_envs, num_actions: as of `VectorEnv`.
      mode: of `envs.metadata["autoreset_mode"]`.

    Raises:
      ValueError: for environments that name no mode, or one that is not known.
      TypeError: for actions that are not discrete.

    Example:
      >>> envs = make_gymnasium("CartPole-v1", 2)
      >>> envs.reset(seed=0).shape, envs.mode, envs.num_actions
      ((2, 4), 'NextStep', 2)
      >>> envs.step(np.array([0, 1])).reward
      array([1., 1.], dtype=float32)
    """

    MODES = ("NextStep", "SameStep", "Disabled")

    def __init__(self, envs: Any):
        self.mode = _mode(envs)
        space = envs.single_action_space
        if not hasattr(space, "n"):
            raise TypeError(
                f"the actions must be numbered, a Discrete space, got {space}. Q-learning"
                " needs the value of each"
            )
        if getattr(space, "start", 0) != 0:
            raise ValueError(f"actions must be numbered from 0, got {space}")
        self.num_envs, self.num_actions = envs.num_envs, int(space.n)
        self._envs = envs
        self._begins = np.zeros(self.num_envs, bool)  # where the next step is none

    def reset(self, seed: int | None = None) -> PyTree:
        """Begins an episode in each; see `VectorEnv`."""
        obs, _ = self._envs.reset(seed=seed)
        self._begins = np.zeros(self.num_envs, bool)
        return _own(obs)

    def step(self, actions: np.ndarray) -> EnvStep:
        """Takes an action in each; see `VectorEnv`."""
        valid = ~self._begins
        obs, reward, terminated, truncated, info = self._envs.step(actions)
        reward = np.array(reward, np.float32)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        done, last = terminated | truncated, _own(obs)
        obs = _own(obs)
        if self.mode == "NextStep":
            self._begins = done
        elif self.mode == "SameStep" and done.any():
            last = _with_final(last, info, done)
        elif self.mode == "Disabled" and done.any():
            obs = _own(self._envs.reset(options={"reset_mask": done})[0])
        return EnvStep(obs, last, reward, terminated, truncated, valid)

    def close(self) -> None:
        """Ends the environments."""
        self._envs.close()


def make_gymnasium(name: str, num_envs: int, **options: Any) -> GymnasiumEnvs:
    """Environments of Gymnasium by their name.

    Args:
      name: as registered, such as "CartPole-v1".
      num_envs: how many.
      **options: of `gymnasium.make_vec`.

    Raises:
      ImportError: if Gymnasium is not installed.
      ValueError: for a name that it does not know.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            f"the environment {name!r} needs the package gymnasium, which is not installed."
            " Run: pip install 'shardjax[rl]'"
        ) from error
    try:
        return GymnasiumEnvs(gymnasium.make_vec(name, num_envs=num_envs, **options))
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(f"Gymnasium knows no environment {name!r}: {error}") from error


def _mode(envs: Any) -> str:
    """The name of the autoreset mode."""
    mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        raise ValueError(
            f"{type(envs).__name__} does not say how it begins episodes anew: its metadata"
            " must have an 'autoreset_mode', as those of Gymnasium 1.1 and later have"
        )
    name = getattr(mode, "value", mode)
    if name not in GymnasiumEnvs.MODES:
        raise ValueError(
            f"the 'autoreset_mode' of {type(envs).__name__} must be one of"
            f" {', '.join(GymnasiumEnvs.MODES)}, got {mode!r}. Wrap the environments in"
            " something with the interface of `shardjax.rl.VectorEnv`"
        )
    return name


def _own(obs: PyTree) -> PyTree:
    # environments may write into the arrays that they have returned (ray #18358)
    return jax.tree.map(np.array, obs)


def _with_final(obs: PyTree, info: dict[str, Any], done: np.ndarray) -> PyTree:
    """Observations, the last one of the episode where one has ended."""
    final, there = info.get("final_obs"), info.get("_final_obs", done)
    if final is None or not np.all(there[done]):
        raise ValueError(
            "environments in the mode SameStep must return the last observations of"
            f" episodes as info['final_obs'], got {sorted(info)}"
        )
    for number in np.flatnonzero(done).tolist():
        last = _last(obs, final, number)
        for whole, x in zip(jax.tree.leaves(obs), jax.tree.leaves(last), strict=True):
            whole[number] = x
    return obs


def _last(obs: PyTree, final: Any, number: int) -> PyTree:
    """An environment's last observation, of arrays of objects or of each entry's own."""
    if isinstance(final, dict):
        return {key: _last(part, final[key], number) for key, part in obs.items()}
    return final[number]

"""Playing episodes by a policy, and the policies that a learner is measured against."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shardjax import rl


def play(
    envs: rl.VectorEnv, choose: Callable[[Any], np.ndarray], seed: int
) -> np.ndarray:
    """Returns of the first episode of each environment, float64 [envs].

    Args:
      envs: to play in.
      choose: actions [envs] in observations [envs, ...].
      seed: of the environments.
    """
    obs = envs.reset(seed=seed)
    returns, going = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while going.any():
        step = envs.step(choose(obs))
        returns += step.reward * going
        going &= ~step.done
        obs = step.obs
    return returns


def references(envs: rl.VectorEnv, seed: int) -> dict[str, float]:
    """Mean returns of policies that learn nothing; none where such policies are not known.

    Of `rl.RecSim`: random choices, the most popular candidate, and of who knows users and
    items as they are, the likeliest click and what is best when looking ahead.

    Args:
      envs: to play in, an episode each.
      seed: of the environments.
    """
    if not isinstance(envs, rl.RecSim):
        return {}
    rng = np.random.default_rng(seed)
    policies = {
        "random": lambda obs: envs.random(rng),
        "popularity": lambda obs: envs.popularity(),
        "myopic_best": lambda obs: envs.best(),
        "planning_best": lambda obs: envs.best(weight=2.0),
    }
    return {
        f"eval/{name}": float(play(envs, choose, seed).mean())
        for name, choose in policies.items()
    }

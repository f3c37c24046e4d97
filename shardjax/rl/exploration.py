"""Which action to take while there is still something to learn."""

import numpy as np


def linear_epsilon(step: int, *, start: float, end: float, steps: int) -> float:
    """The share of random actions at a step: falls linearly from `start`, then stays.

    Args:
      step: steps taken.
      start, end: shares, in [0, 1].
      steps: after which it is `end`.

    Raises:
      ValueError: for a share or number of steps that is out of range.

    Example:
      >>> [round(linear_epsilon(n, start=1, end=0.1, steps=10), 2) for n in (0, 5, 50)]
      [1.0, 0.55, 0.1]
    """
    for name, share in (("start", start), ("end", end)):
        if not 0 <= share <= 1:
            raise ValueError(f"`{name}` must be in [0, 1], got {share}")
    if steps < 1 or step < 0:
        raise ValueError(
            f"`steps` must be positive and `step` not negative, got {steps} and {step}"
        )
    return start + (end - start) * min(step / steps, 1.0)


def epsilon_greedy(
    q_values: np.ndarray, epsilon: float, rng: np.random.Generator
) -> np.ndarray:
    """For each environment the best action, or with probability `epsilon` any.

    Each environment has a coin of its own. As many random numbers are drawn whatever the
    coins say.

    Args:
      q_values: [envs, actions].
      epsilon: in [0, 1]; 0 draws nothing.
      rng: of the coins and of the random actions.

    Returns:
      int64 [envs].

    Raises:
      ValueError: for another shape, a probability out of range, or a NaN among the values.

    Example:
      >>> epsilon_greedy(np.array([[0.0, 1.0], [3.0, 2.0]]), 0, np.random.default_rng(0))
      array([1, 0])
    """
    if q_values.ndim != 2:
        raise ValueError(
            f"`q_values` must have shape [envs, actions], got {list(q_values.shape)}"
        )
    if not 0 <= epsilon <= 1:
        raise ValueError(f"`epsilon` must be in [0, 1], got {epsilon}")
    if np.isnan(q_values).any():
        raise ValueError(
            f"`q_values` must be numbers, got {int(np.isnan(q_values).sum())} NaN of"
            f" {q_values.size}. The network has diverged: lower the learning rate"
        )
    greedy = np.argmax(q_values, axis=1)
    if epsilon == 0:
        return greedy
    envs, actions = q_values.shape
    coins, anything = rng.random(envs), rng.integers(actions, size=envs)
    return np.where(coins < epsilon, anything, greedy)

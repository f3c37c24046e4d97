"""Random actions: how many, and each environment for itself."""

import numpy as np
import pytest

from shardjax import rl


def test_epsilon_falls_linearly_and_stays():
    found = [rl.linear_epsilon(n, start=0.9, end=0.1, steps=4) for n in range(7)]
    np.testing.assert_allclose(found, [0.9, 0.7, 0.5, 0.3, 0.1, 0.1, 0.1])


def test_each_environment_has_a_coin_of_its_own():
    # one coin for all makes whole steps random (seen in stable-baselines3)
    rng = np.random.default_rng(0)
    q_values = np.zeros((64, 4))
    q_values[:, 3] = 1
    actions = np.array([rl.epsilon_greedy(q_values, 0.4, rng) for _ in range(500)])
    other = (actions != 3).mean(1)  # of each step
    assert abs(other.mean() - 0.4 * 3 / 4) < 0.01
    assert other.std() < 2 * np.sqrt(0.3 * 0.7 / 64)
    counts = np.bincount(actions.ravel(), minlength=4) / actions.size
    np.testing.assert_allclose(counts, [0.1, 0.1, 0.1, 0.7], atol=0.01)


def test_without_randomness_nothing_is_drawn():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    actions = rl.epsilon_greedy(np.array([[1.0, 3.0, 2.0]]), 0, rng)
    assert actions.tolist() == [1] and rng.bit_generator.state == before


def test_wrong_values_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"shape \[envs, actions\], got \[3\]"):
        rl.epsilon_greedy(np.zeros(3), 0, rng)
    with pytest.raises(ValueError, match=r"`epsilon` must be in \[0, 1\], got 1.5"):
        rl.epsilon_greedy(np.zeros((1, 3)), 1.5, rng)
    with pytest.raises(ValueError, match="1 NaN of 2. The network has diverged"):
        rl.epsilon_greedy(np.array([[0, np.nan]]), 0, rng)
    with pytest.raises(ValueError, match=r"`end` must be in \[0, 1\], got -1"):
        rl.linear_epsilon(0, start=1, end=-1, steps=3)
    with pytest.raises(ValueError, match="`steps` must be positive"):
        rl.linear_epsilon(0, start=1, end=0, steps=0)

"""Reinforcement learning: deep Q-learning, its targets, and environments."""

from shardjax.rl.dqn import (
    DQNState as DQNState,
    init_dqn as init_dqn,
    make_dqn_step as make_dqn_step,
    make_dqn_update as make_dqn_update,
)
from shardjax.rl.envs import (
    EnvStep as EnvStep,
    GymnasiumEnvs as GymnasiumEnvs,
    VectorEnv as VectorEnv,
    make_gymnasium as make_gymnasium,
)
from shardjax.rl.exploration import (
    epsilon_greedy as epsilon_greedy,
    linear_epsilon as linear_epsilon,
)
from shardjax.rl.recsim import RecSim as RecSim
from shardjax.rl.target import (
    HardCopy as HardCopy,
    Polyak as Polyak,
    TargetRule as TargetRule,
    apply_target as apply_target,
    as_params as as_params,
    init_target as init_target,
    make_target_step as make_target_step,
)

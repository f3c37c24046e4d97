"""Reinforcement learning: replays, deep Q-learning, its targets, and environments.

A replay in RAM
    Replay                          add, sample, set_priorities, get, replace, delete, stats
    Uniform, Proportional, RankBased   what it draws by (Sampler: any of them)
    ReplayBatch, Outcome            what `sample` draws; for which ids something was done
    NStep                           steps of environments to items of n steps

A replay on devices: pure functions of a state, inside jit and scan
    DeviceReplay, DeviceReplayState    of one device
    ShardedReplay                      over an axis of a mesh
    DeviceBatch, DeviceIds             what `sample` draws; slots and generations

Deep Q-learning
    init_dqn, make_dqn_step         a learner's state, sharded by `shardjax.zero`, its update
    make_dqn_update                 the update for jits and scans of your own
    HardCopy, Polyak                how a target network follows
    init_target, apply_target, make_target_step   targets of other learners
    epsilon_greedy, linear_epsilon  which action to take meanwhile

Deep Q-learning over embedding tables
    QLearning, QValues              what `shardjax.make_train_step` trains for; what its
                                    network returns
    keep_target                     a row optimizer that keeps a target of each row
    read_target, copy_targets, check_targets, RowTargetState   in a step of your own
    TouchedCopy                     copies rows that training has touched into another table

Environments
    GymnasiumEnvs, make_gymnasium   vector environments, whatever their autoreset mode
    RecSim, Behaviour               a recommender in which planning pays; its users
    VectorEnv, EnvStep              the interface of them
"""

from shardjax.rl.device_replay import (
    DeviceBatch as DeviceBatch,
    DeviceIds as DeviceIds,
    DeviceReplay as DeviceReplay,
    DeviceReplayState as DeviceReplayState,
)
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
from shardjax.rl.n_step import NStep as NStep
from shardjax.rl.q_learning import QLearning as QLearning, QValues as QValues
from shardjax.rl.recsim import Behaviour as Behaviour, RecSim as RecSim
from shardjax.rl.replay import (
    Outcome as Outcome,
    Replay as Replay,
    ReplayBatch as ReplayBatch,
)
from shardjax.rl.samplers import (
    Proportional as Proportional,
    RankBased as RankBased,
    Sampler as Sampler,
    Uniform as Uniform,
)
from shardjax.rl.sharded_replay import ShardedReplay as ShardedReplay
from shardjax.rl.table_target import (
    RowTargetState as RowTargetState,
    check_targets as check_targets,
    copy_targets as copy_targets,
    keep_target as keep_target,
    read_target as read_target,
)
from shardjax.rl.target import (
    HardCopy as HardCopy,
    Polyak as Polyak,
    TargetRule as TargetRule,
    apply_target as apply_target,
    as_params as as_params,
    init_target as init_target,
    make_target_step as make_target_step,
)
from shardjax.rl.touched import TouchedCopy as TouchedCopy

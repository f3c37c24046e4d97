"""Replays for reinforcement learning.

A replay in RAM
    Replay                          add, sample, set_priorities, get, replace, delete, stats
    Uniform, Proportional, RankBased   what it draws by (Sampler: any of them)
    ReplayBatch, Outcome            what `sample` draws; for which ids something was done
    NStep                           steps of environments to items of n steps

A replay on devices: pure functions of a state, inside jit and scan
    DeviceReplay, DeviceReplayState    of one device
    ShardedReplay                      over an axis of a mesh
    DeviceBatch, DeviceIds             what `sample` draws; slots and generations
"""

from shardjax.rl.device_replay import (
    DeviceBatch as DeviceBatch,
    DeviceIds as DeviceIds,
    DeviceReplay as DeviceReplay,
    DeviceReplayState as DeviceReplayState,
)
from shardjax.rl.n_step import NStep as NStep
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

"""Deep Q-learning on top of the rest: targets, replay, learners, environments."""

from shardjax.rl.q_learning import QLearning as QLearning, QValues as QValues
from shardjax.rl.table_target import (
    RowTargetState as RowTargetState,
    check_targets as check_targets,
    copy_targets as copy_targets,
    keep_target as keep_target,
    read_target as read_target,
)
from shardjax.rl.target import HardCopy as HardCopy, Polyak as Polyak

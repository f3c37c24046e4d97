"""Checkpoints of a run.

    Checkpointer             saves a run while it goes on, and restores it anywhere
    SavePolicy               decides when to save
    StepFolder               the folder of the checkpoints of a run, a directory per step
    Manifest                 what is known of a step
    CorruptCheckpointError   a step is not what was written
    compact                  makes a step with all rows of an increment
    export_checkpoint        rows of a step for other programs

On the command line: ``python -m shardjax.checkpoint inspect|verify|prune|compact|export``.
"""

from shardjax.checkpoint.checkpointer import (
    PREEMPTED as PREEMPTED,
    Checkpointer as Checkpointer,
    Restored as Restored,
)
from shardjax.checkpoint.compact import compact as compact
from shardjax.checkpoint.export import export_checkpoint as export_checkpoint
from shardjax.checkpoint.interval import (
    SavePolicy as SavePolicy,
    parse_interval as parse_interval,
)
from shardjax.checkpoint.manifest import (
    CorruptCheckpointError as CorruptCheckpointError,
    Manifest as Manifest,
)
from shardjax.checkpoint.steps import StepFolder as StepFolder

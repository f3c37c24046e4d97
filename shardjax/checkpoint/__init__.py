"""Checkpoints of a run.

    StepFolder               the folder of the checkpoints of a run, a directory per step
    Manifest                 what is known of a step
    CorruptCheckpointError   a step is not what was written

On the command line: ``python -m shardjax.checkpoint inspect|verify|prune DIR``.
"""

from shardjax.checkpoint.manifest import (
    CorruptCheckpointError as CorruptCheckpointError,
    Manifest as Manifest,
)
from shardjax.checkpoint.steps import StepFolder as StepFolder

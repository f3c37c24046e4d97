"""What a program leaves behind: the folder of `--out`, its writers, its result."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import config as configs
from experiments.checkpoints import resumes
from shardjax import plots, profiling, writers

log = logging.getLogger("experiments.output")


# Options of a process, which may be others when the same run is started again.
_OF_PROCESS = ("coordinator", "num_processes", "process_id", "heartbeat")


def claim(config: Any) -> bool:
    """Makes the folder of a run's files, if it is to have one.

    Returns:
      Whether a run goes on that has files there: one with a checkpoint, or one that is to
      have some, was stopped before the first, and is now started by the same command.

    Raises:
      FileExistsError: if there is another run in the folder, or no folder.
    """
    out, goes_on = config.out, resumes(config)
    if out is None:
        return goes_on
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"`out` must be a folder, and {str(out)!r} is a file")
    if (out / "config.json").exists() and not goes_on:
        if not _was_cut_off(out, config):
            raise FileExistsError(
                f"`out` {str(out)!r} has a run in it already. Give another folder, or"
                " remove it"
            )
        log.info("the run in %s had no checkpoint yet: it starts again", out)
        goes_on = True
    out.mkdir(parents=True, exist_ok=True)
    return goes_on


def _was_cut_off(out: Path, config: Any) -> bool:
    """Whether the run in a folder is one of these options that has not come to its end,
    and whose command may be given again."""
    if config.checkpoint.dir is None or config.resume != "auto":
        return False
    if (out / "result.json").exists():
        return False
    before = json.loads((out / "config.json").read_text())
    return _without_process(before) == _without_process(json.loads(_resolved(config)))


def _without_process(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in _OF_PROCESS}


def _resolved(config: Any) -> str:
    """All options, as config.json has them."""
    return json.dumps(configs.to_dict(config), indent=2, default=str) + "\n"


def open_writers(
    out: Path | None, config: Any, goes_on: bool = False
) -> writers.MultiWriter:
    """Writers of the run's metrics, after those of the run that goes on, as `claim` has
    found; without a folder they write nothing."""
    if out is None:
        return writers.MultiWriter([])
    # whole or not at all: who starts the command again is known by it
    written = out / "config.json.partial"
    written.write_text(_resolved(config))
    written.replace(out / "config.json")
    return writers.MultiWriter(
        [
            writers.JsonlWriter(
                out / "metrics.jsonl", mode="append" if goes_on else "create"
            ),
            writers.TensorBoardWriter(out),
        ]
    )


def trace_window(
    profile: tuple[str, str] | None, out: Path | None
) -> profiling.TraceWindow:
    """The trace of `--profile steps FIRST:LAST`; without it, one that never starts.

    Raises:
      ValueError: for steps of another form, or without a folder to write to.
    """
    if profile is None:
        return profiling.TraceWindow("0:0", ".")  # steps count from 1
    if out is None:
        raise ValueError(
            f"`profile` {' '.join(profile)!r} needs a folder for the trace: give --out too"
        )
    return profiling.TraceWindow(profile[1], out / "trace")


def write_result(
    out: Path,
    result: dict[str, Any],
    rows: list[dict[str, float]],
    panels: Sequence[str],
) -> None:
    """Writes result.json, and curves.png of the rows of metrics.jsonl."""
    plots.curves(out / "curves.png", rows, panels=panels)
    text = json.dumps(result, indent=2, allow_nan=False)
    (out / "result.json").write_text(text + "\n")


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values with None, JSON's null, for numbers that are not finite."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in values.items()
    }


def as_floats(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Rows of values that `finite` was made of."""
    return [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]

"""What a program leaves behind: the folder of `--out`, its writers, its result."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import config as configs
from shardjax import plots, profiling, writers


def claim(out: Path, resumes: bool = False) -> None:
    """Makes the folder of a run's files, or refuses one that has a run in it, unless that
    is the one that goes on."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"`out` must be a folder, and {str(out)!r} is a file")
    if (out / "config.json").exists() and not resumes:
        raise FileExistsError(
            f"`out` {str(out)!r} has a run in it already. Give another folder, or remove it"
        )
    out.mkdir(parents=True, exist_ok=True)


def open_writers(
    out: Path | None, config: Any, resumes: bool = False
) -> writers.MultiWriter:
    """Writers of the run's metrics, after those of the run that goes on; without a folder
    they write nothing."""
    if out is None:
        return writers.MultiWriter([])
    resolved = json.dumps(configs.to_dict(config), indent=2, default=str)
    (out / "config.json").write_text(resolved + "\n")
    return writers.MultiWriter(
        [
            writers.JsonlWriter(
                out / "metrics.jsonl", mode="append" if resumes else "create"
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

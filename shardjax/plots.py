"""Pictures of a run, from the rows that a `shardjax.writers.JsonlWriter` wrote.

They need the extra ``shardjax[plot]``.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TIERS = {
    "on the devices": "tiers/device_hit_rate",
    "in RAM": "tiers/host_hit_rate",
    "on disk": "tiers/disk_hit_rate",
    "new": "tiers/new_rate",
}
# name in the legend: (value of a row, milliseconds in its unit)
TIMES = {
    "planner": ("planner/planner_ms", 1.0),
    "loop waits for a batch": ("loader/wait_s", 1e3),
    "devices have no step": ("device/wait_s", 1e3),
}


def curves(
    path: str | os.PathLike,
    rows: Iterable[Mapping[str, Any]],
    *,
    panels: Sequence[str] = ("loss", "auc"),
) -> None:
    """Draws curves over the steps into a PNG.

    Args:
      path: the PNG; its folder is made if need be.
      rows: as of `read_rows`: dicts with "step" and values; None and nan are gaps. Of
        two rows with one step and name the later one holds.
      panels: one diagram each, of all values whose last part of the name contains it:
        "loss" draws train/loss and eval/logloss. Those without a value are left out.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if there is nothing to draw.

    Example:
      >>> import tempfile
      >>> path = os.path.join(tempfile.mkdtemp(), "curves.png")
      >>> curves(path, [{"step": 1, "eval/auc": 0.7}, {"step": 2, "eval/auc": 0.8}])
      >>> Path(path).stat().st_size > 1000
      True
    """
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                lines.setdefault(name, {})[row["step"]] = _point(value)
    drawn = {
        panel: names
        for panel in panels
        if (names := [n for n in lines if panel in n.rsplit("/", 1)[-1]])
    }
    if not drawn:
        raise ValueError(
            f"curves need values with names such as {', '.join(panels)}, got"
            f" {sorted(lines)}. Pass rows that hold some, or other `panels`."
        )
    figure = _figure(6 * len(drawn), 4)
    axes = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axis, (panel, names) in zip(axes, drawn.items(), strict=True):
        for name in names:
            steps = sorted(lines[name])
            points = [lines[name][step] for step in steps]
            axis.plot(steps, points, marker=_marker(steps), label=name)
        axis.set(xlabel="step", title=panel)
        axis.grid(alpha=0.3)
        axis.legend()
    _save(figure, path)


def tiers(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Draws where a run found its rows, and what took its time, into a PNG.

    The upper panel has the share of the rows of the batches that lay in each tier. The
    lower one has milliseconds per step: of the planner, of the loop waiting for batches
    and, as the part of this in which no step was under way, of the devices waiting; and
    of the step in all.

    Args:
      path: the PNG; its folder is made if need be.
      rows: as of `curves`, from the first step on, with the values of `TIERS` and `TIMES`
        and "train/step_ms", the mean time of the steps since the row before. Rows without
        the last are left out.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if there is nothing to draw.

    Example:
      >>> import tempfile
      >>> path = os.path.join(tempfile.mkdtemp(), "tiers.png")
      >>> row = {"tiers/device_hit_rate": 0.9, "tiers/host_hit_rate": 0.1}
      >>> row |= {"train/step_ms": 20.0, "planner/planner_ms": 55.0, "loader/wait_s": 0.01}
      >>> tiers(path, [{"step": 10, **row}, {"step": 20, **row}])
      >>> Path(path).stat().st_size > 1000
      True
    """
    rows = [row for row in rows if "train/step_ms" in row]
    if not rows:
        raise ValueError(
            "the picture of the tiers needs rows with 'train/step_ms', got none. Pass those"
            " that training wrote."
        )
    ends = [row["step"] for row in rows]
    counts = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    figure = _figure(9, 7)
    upper, lower = figure.subplots(2, 1, sharex=True)
    rates = [[_point(row.get(name)) for row in rows] for name in TIERS.values()]
    # a row is about the steps since the row before: from edge to edge
    levels = [[shares[0], *shares] for shares in rates]
    upper.stackplot([0, *ends], levels, labels=list(TIERS), step="pre", alpha=0.8)
    upper.set(
        title="Where the rows of the batches were found",
        ylabel="share of unique rows",
        ylim=(0, 1),
    )
    lines = {"step, in all": [_point(row["train/step_ms"]) for row in rows]}
    for label, (name, scale) in TIMES.items():
        lines[label] = [
            scale * _point(row.get(name)) / count
            for row, count in zip(rows, counts, strict=True)
        ]
    for label, points in lines.items():
        lower.plot(ends, points, marker=_marker(ends), label=label)
    title = "Time per step"
    # the first row has the compilation in it, which would flatten the others
    first = max(points[0] for points in lines.values())
    later = [x for points in lines.values() for x in points[1:] if math.isfinite(x)]
    if later and first > 2 * max(later) > 0:
        lower.set_ylim(0, 1.1 * max(later))
        title += f" (the first {ends[0]}, with compilation: {first:.0f} ms)"
    else:
        lower.set_ylim(bottom=0)
    lower.set(title=title, xlabel="step", ylabel="ms per step", xlim=(0, ends[-1]))
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)


def _point(value: float | None) -> float:
    return math.nan if value is None else value


def _marker(steps: Sequence[int]) -> str:
    # A single point makes no line.
    return "." if len(steps) < 30 else ""


def _figure(width: float, height: float):
    """A figure that is not pyplot's, which has a global backend and open figures."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need the package matplotlib, which is not installed. Run: pip"
            " install 'shardjax[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure, path: str | os.PathLike) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.canvas.print_png(os.fspath(path))

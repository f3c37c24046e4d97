"""The pictures that a run leaves."""

import math
import sys

import pytest
import tensorboardX  # noqa: F401 (here, as its import sets an environment variable)

from shardjax.plots import curves, tiers
from shardjax.writers import JsonlWriter, read_rows
from tests.helpers import run_python

# --- curves ---------------------------------------------------------------------------

ROWS = [
    {"step": 1, "train/loss": 0.7, "planner/unique_ids": 10},
    {"step": 2, "train/loss": None, "eval/auc": 0.6},
    {"step": 3, "train/loss": math.nan, "eval/auc": 0.7, "eval/logloss": 0.5},
    {"step": 2, "eval/auc": 0.65},
]


def test_curves_draws_losses_and_aucs(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot

    def record(self, steps, points, **settings):
        drawn.append((settings["label"], steps, points))
        return plot(self, steps, points, **settings)

    monkeypatch.setattr(Axes, "plot", record)
    path = tmp_path / "new" / "curves.png"
    curves(path, ROWS)
    assert path.read_bytes().startswith(b"\x89PNG")
    names = [name for name, _, _ in drawn]
    assert names == ["train/loss", "eval/logloss", "eval/auc"]
    # The later of the two rows of step 2 holds; None and nan are gaps.
    assert drawn[2] == ("eval/auc", [2, 3], [0.65, 0.7])
    assert drawn[0][2] == [0.7, *[pytest.approx(math.nan, nan_ok=True)] * 2]


def test_curves_from_the_file_of_a_run(tmp_path):
    with JsonlWriter(tmp_path / "a.jsonl") as writer:
        for step in range(1, 50):
            writer.write(step, {"train/loss": 1 / step})
    curves(tmp_path / "a.png", read_rows(tmp_path / "a.jsonl"), panels=["loss"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_curves_refuses_rows_with_nothing_to_draw(tmp_path):
    for rows in ([], [{"step": 1, "planner/unique_ids": 3}]):
        with pytest.raises(
            ValueError, match="curves need values with names such as loss"
        ):
            curves(tmp_path / "a.png", rows)
    assert list(tmp_path.iterdir()) == []


def test_curves_names_the_extra_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'shardjax\[plot\]'"):
        curves(tmp_path / "a.png", ROWS)


def test_matplotlib_loads_lazily_and_curves_leave_the_backend_alone(tmp_path):
    program = """
import json, sys
from shardjax.plots import curves
import shardjax.writers
assert not {"matplotlib", "tensorboardX"} & set(sys.modules)
curves(sys.argv[1], json.loads('[{"step": 1, "eval/auc": 0.5}]'))
assert "matplotlib.pyplot" not in sys.modules
"""
    run_python(program, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --- tiers ----------------------------------------------------------------------------


def tier_row(step, device, step_ms, planner_ms, wait, idle, rest=(0.25, 0.125, 0.125)):
    names = ("host_hit_rate", "disk_hit_rate", "new_rate")
    return {
        "step": step,
        "tiers/device_hit_rate": device,
        **{f"tiers/{name}": share for name, share in zip(names, rest, strict=True)},
        "train/step_ms": step_ms,
        "planner/planner_ms": planner_ms,
        "loader/wait_s": wait,
        "device/wait_s": idle,
    }


@pytest.fixture
def drawn(monkeypatch):
    """What the axes were told to draw: points by label, and the axes."""
    from matplotlib.axes import Axes

    found = {}
    plot, stackplot = Axes.plot, Axes.stackplot

    def record_plot(self, steps, points, **settings):
        found[settings["label"]] = (steps, points)
        found["lower"] = self
        return plot(self, steps, points, **settings)

    def record_stack(self, steps, levels, **settings):
        for label, shares in zip(settings["labels"], levels, strict=True):
            found[label] = (steps, shares)
        found["upper"] = self
        return stackplot(self, steps, levels, **settings)

    monkeypatch.setattr(Axes, "plot", record_plot)
    monkeypatch.setattr(Axes, "stackplot", record_stack)
    return found


def test_tiers_draws_shares_and_milliseconds_per_step(tmp_path, drawn):
    rows = [
        tier_row(10, 0.5, 900.0, 50.0, 0.1, 0.0),
        tier_row(30, 0.25, 40.0, 200.0, 0.4, 0.2, rest=(0.5, 0.125, 0.125)),
        tier_row(35, 0.5, 30.0, 100.0, 0.05, 0.0),
        {"step": 35, "planner/planner_ms": 350.0},  # the result of a run
    ]
    path = tmp_path / "new" / "tiers.png"
    tiers(path, rows)
    assert path.read_bytes().startswith(b"\x89PNG")
    # the steps up to 10 had the first row's shares
    edges = [0, 10, 30, 35]
    assert drawn["on the devices"] == (edges, [0.5, 0.5, 0.25, 0.5])
    assert drawn["in RAM"] == (edges, [0.25, 0.25, 0.5, 0.25])
    assert drawn["on disk"] == drawn["new"] == (edges, [0.125] * 4)
    steps = [10, 30, 35]
    assert drawn["step, in all"] == (steps, [900.0, 40.0, 30.0])
    assert drawn["planner"] == (steps, [5.0, 10.0, 20.0])
    assert drawn["loop waits for a batch"] == (steps, pytest.approx([10.0, 20.0, 10.0]))
    assert drawn["devices have no step"] == (steps, pytest.approx([0.0, 10.0, 0.0]))
    # compilation does not set the scale, and the picture says so
    assert drawn["lower"].get_ylim() == pytest.approx((0, 44))
    assert "the first 10, with compilation: 900 ms" in drawn["lower"].get_title()
    for axis in (drawn["upper"], drawn["lower"]):
        assert axis.get_title() and axis.get_ylabel() and axis.get_legend()
    assert drawn["lower"].get_xlabel() == "step"


def test_tiers_of_one_row_and_with_gaps(tmp_path, drawn):
    row = tier_row(4, None, 30.0, 100.0, 0.05, None, rest=(None, None, None))
    tiers(tmp_path / "a.png", [row])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert drawn["planner"] == ([4], [25.0])
    assert math.isnan(drawn["devices have no step"][1][0])
    assert drawn["lower"].get_title() == "Time per step"


def test_tiers_refuses_rows_without_training(tmp_path):
    with pytest.raises(ValueError, match="needs rows with 'train/step_ms', got none"):
        tiers(tmp_path / "a.png", [{"step": 1, "eval/auc": 0.5}])
    assert list(tmp_path.iterdir()) == []

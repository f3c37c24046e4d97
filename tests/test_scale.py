"""Steps compiled for TPUs that are not here: whether they fit, and what they send."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tensorboardX  # noqa: F401  its import sets an environment variable

from experiments import config as configs, lm, scale
from shardjax import make_mesh
from tests.helpers import run_python

ROOT = Path(__file__).parent.parent

MEASURE = """
import json, os, sys
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
from experiments import scale
print(json.dumps(scale.measure(json.loads(sys.argv[1]))))
"""

on_tpus = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not importlib.util.find_spec("libtpu"), reason="libtpu is not installed"
    ),
]


def asked(**options):
    """A row of the command: 1.2 G parameters on 8 TPUs.

    Its sizes are multiples of TPUs' tiles also after they were split over 8 devices, so
    nothing is padded.
    """
    config = scale.Config(
        topologies=("v5e:2x4",), sizes=("large",), stages=(0,), offloads=("none",)
    )
    [row] = scale.cases(config)
    return row | options


def measured(**options):
    done = run_python(MEASURE, json.dumps(asked(**options)))
    return json.loads(done.stdout.splitlines()[-1])


def assert_state_is_as_planned(row):
    planned = row["estimate"]["params"] + row["estimate"]["opt_state"]
    assert row["memory"]["arguments"] == pytest.approx(planned, rel=0.02)


ROW = {
    "mesh": "8x1",
    "parameters": 2_000_000,
    "estimate": {"params": 2**29, "opt_state": 2**29, "host": 0, "total": 3 * 2**29},
    "predicted_wire": 2e6,
    "seconds": 12.3,
    "memory": {"arguments": 2**30, "peak": 2**31, "host": 2**28},
    "wire": 3e6,
    "unknown": 0,
}


def test_rows_become_lines_of_the_table(monkeypatch):
    monkeypatch.setattr(scale, "_version", lambda package: "1.2.3")
    too_large = {k: v for k, v in ROW.items() if k not in ("memory", "wire")}
    too_large["needed"] = [19.5, 15.75]
    text = scale.document(
        [
            asked(zero=3) | ROW | {"unknown": 2},
            asked(topology="2*v5e:2x4", offload="opt_state") | too_large,
            asked() | too_large | {"needed": None, "refused": "No such slices yet"},
            asked(zero=3, offload="all") | ROW,
        ]
    )
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[2:] == [
        "| v5e:2x4 | 8x1 | large | 2.0 M | 3 | 1.000 | 1.000 | 1.500 | 2.000 | 0.250 | yes"
        " | 2.0 | 3.0 (1.50x, 2 unknown) | 12 s |",
        "| 2 x v5e:2x4 | 8x1 | large | 2.0 M | 0, offload | 1.000 | - | 1.500 | - | 0.000"
        " | does not fit: needs 19.50 of 15.75 | 2.0 | - | 12 s |",
        "| v5e:2x4 | 8x1 | large | 2.0 M | 0 | 1.000 | - | 1.500 | - | 0.000"
        " | refused: No such slices yet | 2.0 | - | 12 s |",
        "| v5e:2x4 | 8x1 | large | 2.0 M | 3, offload all | 1.000 | 1.000 | 1.500 | 2.000"
        " | 0.250 | yes | 2.0 | 3.0 (1.50x) | 12 s |",
    ]
    assert "1 sequence\nof 1024 bytes per device, precision bf16, remat full" in text


def test_rows_of_a_file_are_not_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(scale, "_version", lambda package: "1.2.3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    made = []
    monkeypatch.setattr(scale, "measure", lambda row: made.append(row["zero"]) or ROW)
    options = {"sizes": ("large",), "topologies": ("v5e:2x4",), "offloads": ("none",)}
    files = {"out": tmp_path / "t.md", "rows": tmp_path / "rows.jsonl"}
    scale.main(scale.Config(stages=(0, 3), **options, **files))
    rows = scale.main(scale.Config(stages=(3, 1, 0), **options, **files))
    assert made == [0, 3, 1]
    assert [row["zero"] for row in rows] == [3, 1, 0]
    assert files["out"].read_text().count("| v5e:2x4 |") == 3


def test_parameters_are_offloaded_at_stage_3_only():
    config = scale.Config(topologies=("v5e:2x4",), offloads=("none", "all"))
    found = [(row["zero"], row["offload"]) for row in scale.cases(config)]
    assert found == [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "all")]


@pytest.mark.parametrize("text", ["v5e", "2x4", "0*v5e:2x4", "v5e:2x4*2", "v5e:2x"])
def test_a_bad_topology_is_refused(text):
    with pytest.raises(configs.ConfigError, match="must be GENERATION:AxB, or SLICES"):
        configs.from_dict(scale.Config, {"topologies": [text]})


def test_a_topology_may_have_slices():
    assert scale.parse_topology("v5p:2x2x1") == ("v5p:2x2x1", 1)
    assert scale.parse_topology("4*v5e:16x16") == ("v5e:16x16", 4)


def test_without_libtpu_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package libtpu.*shardjax\[aot"):
        scale.main(scale.Config())


def test_a_mesh_of_another_shape_is_refused():
    config = lm.from_anything({"mesh": "2x1"})
    with pytest.raises(
        ValueError, match="must have the shape 2x1 of the config, got 4x"
    ):
        lm.build(config, make_mesh("4x1"))


class Failing:
    """A lowered program that the compiler refuses."""

    def __init__(self, message):
        self.message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO"
            " temporaries (18.17G) exceeds available HBM (15.75G).",
            {"needed": [18.17, 15.75]},
        ),
        ("UNIMPLEMENTED: No slices yet.\n\nWhile: a = b", {"refused": "No slices yet"}),
    ],
)
def test_what_cannot_be_compiled_says_why(message, problem):
    assert scale.compile_or_not(Failing(message)) == (None, problem)


def test_other_errors_of_the_compiler_are_not_hidden():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        scale.compile_or_not(Failing("INTERNAL: (2.0G) exceeds available HBM (1.0G)"))


def test_help_explains_every_option():
    command = [sys.executable, "-m", "experiments.scale", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for field in dataclasses.fields(scale.Config):
        assert f"--{field.name.replace('_', '-')} " in done.stdout


class TestOnTpus:
    """Programs of the compiler of TPUs."""

    pytestmark = on_tpus

    def test_stage_0_does_not_fit(self):
        row = measured(zero=0)
        needed, available = row["needed"]
        planned = row["estimate"]["total"] / 2**30
        assert planned > available == 15.75
        assert needed == pytest.approx(planned, rel=0.02)

    def test_stage_3_fits_and_sends_what_is_planned(self):
        row = measured(zero=3)
        assert row["estimate"]["total"] < row["memory"]["peak"] < 15.75 * 2**30
        assert_state_is_as_planned(row)
        assert row["memory"]["host"] == row["unknown"] == 0
        assert row["wire"] == pytest.approx(row["predicted_wire"], rel=0.01)

    def test_stage_1_sums_one_parameter_whole(self):
        """The compiler turns the reduce-scatter of one stack, that of the matrices to
        queries, keys and values, into an all-reduce, of which it keeps a part."""
        row = measured(zero=1)
        assert_state_is_as_planned(row)
        assert row["unknown"] == 0
        whole = 24 * 2048 * 3 * 2048 * 4
        expected = row["predicted_wire"] + 7 / 8 * whole
        assert row["wire"] == pytest.approx(expected, rel=0.01)

    def test_offloaded_state_is_on_the_host(self):
        row = measured(zero=3, offload="opt_state")
        assert_state_is_as_planned(row)
        host = row["estimate"]["host"]
        assert host == pytest.approx(row["parameters"] * 8 / 8, rel=0.01)
        assert row["memory"]["host"] == pytest.approx(2 * host, rel=0.01)  # old and new
        assert row["estimate"]["total"] < row["memory"]["peak"] < 2 * 2**30
        assert row["wire"] == pytest.approx(row["predicted_wire"], rel=0.01)

"""The rules of who may import whom fail on a violation of each of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = "Layers of the library"
PROGRAMS = "The library knows no program and no flags"
PICTURES = "tensorboardX only in writers, matplotlib only in plots"
FLAX = "flax only in models and where a user's module becomes a function"
RL = "rl is about any network: no tables, data or checkpoints"
TOC = "Inside the library, nothing imports the table of contents"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the code to plant violations in."""
    root = tmp_path_factory.mktemp("copy")
    for package in ("shardjax", "experiments"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, root / package, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def _lint_imports(root) -> subprocess.CompletedProcess[str]:
    # sys.path[0] is the working directory, so the copy is what is checked.
    program = "from importlinter.cli import lint_imports_command as f; f()"
    command = [sys.executable, "-c", program, "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def _ruff(root) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID251"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_the_code_keeps_the_rules(copy):
    for run in (_lint_imports(copy), _ruff(copy)):
        assert run.returncode == 0, run.stdout + run.stderr


VIOLATIONS = [
    ("mesh", "import shardjax.partition", LAYERS),
    ("partition", "import shardjax.embed", LAYERS),
    ("partition", "import shardjax.train", LAYERS),
    ("embed/spec", "import shardjax.train", LAYERS),
    ("embed/spec", "import shardjax.data", LAYERS),
    ("embed/spec", "import shardjax.metrics", LAYERS),
    ("data/batch", "import shardjax.embed.plan", LAYERS),
    ("metrics/total", "import shardjax.state", LAYERS),
    ("profiling/wire", "import shardjax.network", LAYERS),
    ("models/mlp", "import shardjax.embed.jagged", LAYERS),
    ("state", "import shardjax.train", LAYERS),
    ("novelty", "import os", LAYERS),
    ("train", "import experiments", PROGRAMS),
    ("train", "def f():\n    import tyro", PROGRAMS),
    ("state", "import matplotlib.pyplot", PICTURES),
    ("writers", "import matplotlib.figure", PICTURES),
    ("plots", "import tensorboardX", PICTURES),
    ("models/mlp", "import torch", PROGRAMS),
    ("train", "from numba import njit", "numba only in embed, data and rl"),
    ("models/mlp", "import numba", "numba only in embed, data and rl"),
    ("embed/spec", "import pyarrow.csv", "pyarrow only in data and export"),
    ("export/rows", "import shardjax.checkpoint", LAYERS),
    ("embed/spec", "from flax import nnx", FLAX),
    ("metrics/total", "import flax.linen", FLAX),
    ("train", "import orbax.checkpoint", "orbax and tensorstore only in checkpoint"),
    ("data/batch", "import tensorstore", "orbax and tensorstore only in checkpoint"),
    ("train", "import tensorboardX", PICTURES),
    ("rl/target", "import shardjax.train", LAYERS),
    ("embed/spec", "import shardjax.rl", LAYERS),
    ("rl/replay", "import shardjax.embed", RL),
    ("rl/dqn", "from flax import nnx", FLAX),
    ("embed/spec", "import shardjax", TOC),
    ("mesh", "from shardjax import __version__", TOC),
]


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    VIOLATIONS,
    ids=lambda part: part.split("\n")[-1].strip(),
)
def test_a_planted_violation_breaks_its_rule(copy, module, line, rule):
    with _planted(copy, module, line):
        run = _lint_imports(copy)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"{rule} BROKEN" in run.stdout


@pytest.mark.parametrize(
    "name",
    [
        "experiments",
        "matplotlib",
        "orbax.checkpoint",
        "tensorboardX",
        "tensorflow",
        "torch.nn",
        "tyro",
    ],
)
def test_a_planted_banned_import_is_refused(copy, name):
    with _planted(copy, "train", f"def f():\n    import {name}"):
        run = _ruff(copy)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"`{name.split('.')[0]}` is banned" in run.stdout


class _planted:
    """Adds a line to a module of the copy for a while."""

    def __init__(self, root, module, line):
        self.path = root / "shardjax" / f"{module}.py"
        self.before = self.path.read_text() if self.path.exists() else None
        self.line = line

    def __enter__(self):
        self.path.write_text(f"{self.before or ''}\n{self.line}\n")

    def __exit__(self, *_):
        if self.before is None:
            self.path.unlink()
        else:
            self.path.write_text(self.before)

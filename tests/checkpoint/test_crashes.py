"""A run that is killed at any moment goes on from its newest step, and ends the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path, request):
    kills = 30 if request.config.getoption("--all-combinations") else 6
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crashing", str(tmp_path), str(kills)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["killed"] == kills

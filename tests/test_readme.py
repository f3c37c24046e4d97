"""The commands of the README are those that CI runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_ci_runs_the_second_command():
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    tests = commands[1].strip()
    assert tests.startswith("python3 -m venv") and "pytest" in tests
    assert tests in (ROOT / ".ci" / "run").read_text()

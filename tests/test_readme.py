"""The Python of the README and of docs runs; commands are those that CI runs."""

import re
from pathlib import Path

import gymnasium  # noqa: F401  its import sets an environment variable

ROOT = Path(__file__).parent.parent


def test_the_example_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    code = "\n".join(blocks)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert re.search(r"\d+ \{'auc': ", capsys.readouterr().out)


def test_the_examples_of_exports_run(capsys):
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.S
    )
    code = "\n".join(blocks)
    exec(compile(code, "export.md", "exec"), {"__name__": "export"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "['key', 'vector', 'last_step', 'uses'] (1000, 4)"
    assert lines[1] == "(1000,) (1000, 4) float32"
    assert lines[2].startswith("[0.")
    assert lines[3] == "[ True False]"


def test_the_example_of_reinforcement_learning_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rl.md").read_text(), re.S)
    exec(compile("\n".join(blocks), "rl.md", "exec"), {"__name__": "rl"})
    updates, loss = re.match(
        r"(\d+) updates, the loss is ([\d.]+)\n", capsys.readouterr().out
    ).groups()
    assert 80 < int(updates) < 90 and 0 < float(loss) < 2


def test_ci_runs_the_second_command():
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    tests = commands[1].strip()
    assert tests.startswith("python3 -m venv") and "pytest" in tests
    assert tests in (ROOT / ".ci" / "run").read_text()


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target

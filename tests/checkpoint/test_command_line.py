"""`python -m shardjax.checkpoint`: what it prints, and its exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardjax.checkpoint import StepFolder
from shardjax.checkpoint.__main__ import _size, main

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def path(tmp_path):
    """A folder with steps 5, 10 and 115; the last needs the first."""
    path = tmp_path / "run"
    with StepFolder(path, write=True) as folder:
        for step, needs in ((5, []), (10, []), (115, [5])):
            directory = folder.begin(step)
            (directory / "a.bin").write_bytes(bytes(step * 1000))
            if step == 10:
                (directory / "b.bin").write_bytes(b"")
            folder.commit(step, {"seed": step, "loader": {"epoch": 1}}, needs=needs)
            written = 1_700_000_000 + step
            os.utime(path / f"step_{step}" / "manifest.json", (written, written))
    return str(path)


def call(capsys, *arguments):
    """Exit code and what is printed."""
    code = main(arguments)
    return code, *capsys.readouterr()


WHEN = r"2023-11-1\d \d\d:\d\d:\d\d"


def test_inspect_shows_a_table(path, capsys):
    code, out, err = call(capsys, "inspect", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "step  written              files  size"
    assert re.fullmatch(rf"   5  {WHEN}  1      5\.0 kB", lines[1])
    assert re.fullmatch(rf"  10  {WHEN}  2      10\.0 kB", lines[2])
    assert re.fullmatch(rf" 115  {WHEN}  1      115\.0 kB", lines[3])
    assert len(lines) == 4


def test_inspect_shows_the_details_of_a_step(path, capsys):
    code, out, err = call(capsys, "inspect", path, "--step", "115")
    assert (code, err) == (0, "")
    first, rest = out.split("\n", 1)
    assert re.fullmatch(
        rf"step 115: {WHEN}, 1 file, 115\.0 kB, needs steps \[5\]", first
    )
    assert rest == '{\n  "loader": {\n    "epoch": 1\n  },\n  "seed": 115\n}\n'


def test_inspect_tells_of_a_manifest_that_has_changed(path, capsys):
    Path(path, "step_10", "manifest.json").write_text("{}")
    code, out, err = call(capsys, "inspect", path)
    assert (code, err) == (1, "")
    assert "  10  its manifest has changed\n" in out
    code, out, err = call(capsys, "inspect", path, "--step", "10")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: step 10 in .* 'manifest.json' has changed\..*\n", err)


def test_verify_has_a_line_per_step(path, capsys):
    assert call(capsys, "verify", path) == (
        0,
        "step 5: ok, 1 file, 5.0 kB\n"
        "step 10: ok, 2 files, 10.0 kB\n"
        "step 115: ok, 1 file, 115.0 kB\n",
        "",
    )
    assert call(capsys, "verify", path, "--step", "10") == (
        0,
        "step 10: ok, 2 files, 10.0 kB\n",
        "",
    )


def test_verify_says_what_is_wrong(path, capsys):
    Path(path, "step_5", "a.bin").unlink()
    code, out, err = call(capsys, "verify", path)
    first, *rest = out.splitlines()
    assert (code, err) == (1, "")
    assert first.startswith(
        f"step 5 in {path!r} is not what was written: 'a.bin' is mis"
    )
    assert rest == ["step 10: ok, 2 files, 10.0 kB", "step 115: ok, 1 file, 115.0 kB"]
    assert call(capsys, "verify", path, "--step", "10")[0] == 0
    assert call(capsys, "verify", path, "--step", "5")[0] == 1


def test_verify_shows_its_progress_on_a_terminal(path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = call(capsys, "verify", path, "--step", "115")
    assert code == 0 and out == "step 115: ok, 1 file, 115.0 kB\n"
    assert "step 115:" in err and "/115k" in err


def test_prune_says_what_it_removes(path, capsys):
    assert call(capsys, "prune", path, "--keep", "1") == (
        0,
        "removed step 10\nsteps left: 5, 115\n",
        "",
    )
    assert call(capsys, "prune", path, "--keep", "3")[1] == "steps left: 5, 115\n"


def test_empty_folders(tmp_path, capsys):
    path = str(tmp_path)
    assert call(capsys, "inspect", path) == (0, "no steps\n", "")
    assert call(capsys, "prune", path, "--keep", "1") == (0, "steps left: none\n", "")
    for command in ("verify", "compact", "export"):
        message = f"error: there are no steps in {path!r} to {command}. Give the folder"
        more = [f"{path}/out"] if command == "export" else []
        code, out, err = call(capsys, command, path, *more)
        assert (code, out) == (2, "") and err.startswith(message)


@pytest.mark.parametrize("command", ["inspect", "verify", "prune", "compact", "export"])
def test_a_folder_that_is_not_there(tmp_path, capsys, command):
    path = str(tmp_path / "gone")
    more = {"prune": ["--keep", "1"], "export": [f"{path}/out"]}.get(command, [])
    code, out, err = call(capsys, command, path, *more)
    message = (
        f"error: checkpoints are read from a folder, and {path!r} is none. Give the"
    )
    assert (code, out) == (2, "") and err.startswith(message) and err.count("\n") == 1
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "--step", "7"], "there is no step 7 in .*; there are 5, 10, 115"),
        (["verify", "--step", "7"], "there is no step 7 in .*; there are 5, 10, 115"),
        (["verify", "--step", "-1"], "a step must not be negative, got -1"),
        (
            ["prune", "--keep", "0"],
            "`keep` of `prune` must be an integer of at least 1",
        ),
    ],
)
def test_mistakes_are_one_line(path, capsys, arguments, message):
    code, out, err = call(capsys, arguments[0], path, *arguments[1:])
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: {message}.*\n", err)


def test_prune_leaves_a_folder_alone_that_a_run_writes_to(path, capsys):
    with StepFolder(path, write=True) as folder:
        partial = folder.begin(200)
        code, out, err = call(capsys, "prune", path, "--keep", "1")
        assert (code, out) == (2, "") and "in use by this very process" in err
        assert partial.exists() and folder.steps() == [5, 10, 115]
        assert call(capsys, "verify", path)[0] == 0  # reading does no harm


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([], ["list the steps", "read all files", "remove old steps", "Exit code 0"]),
        (["inspect"], ["the folder of the checkpoints", "show this step"]),
        (["verify"], ["the folder of the checkpoints", "check this step only"]),
        (["prune"], ["the folder of the checkpoints", "how many of the newest"]),
        (
            ["export"],
            ["the folder for the files", "Feather", "this table", "at least N"],
        ),
    ],
)
def test_help_explains_each_option(capsys, arguments, texts):
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(text in out for text in texts), out
    assert "python -m shardjax.checkpoint" in out


@pytest.mark.parametrize(
    "arguments", [[], ["shrink", "x"], ["prune", "x"], ["verify"], ["export", "x"]]
)
def test_arguments_that_are_missing_or_unknown(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_sizes_for_people():
    sizes = [0, 999, 1000, 999_949, 2_500_000, 3 * 10**9, 4 * 10**12, 5 * 10**15]
    assert [_size(size) for size in sizes] == [
        *("0 B", "999 B", "1.0 kB", "999.9 kB", "2.5 MB", "3.0 GB", "4.0 TB"),
        "5000.0 TB",
    ]


def test_it_runs_as_a_module(path):
    Path(path, "step_5", "a.bin").unlink()
    command = [sys.executable, "-m", "shardjax.checkpoint", "verify", path]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stderr == ""
    assert "step 10: ok, 2 files, 10.0 kB\n" in done.stdout

"""Programs of several processes of which one is killed, and the same command again."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from shardjax.writers import read_rows
from tests.cluster import cluster, free_port

CTR = (
    "--mesh", "2x1", "--model.name", "lr",
    "--data.rows", "3200", "--data.eval-rows", "300",
    "--data.vocabulary", "3000", "500", "20", "--batch-size", "64",
    "--storage.device-rows", "700", "--storage.host-bytes", "20KB",
    "--storage.lookahead", "3", "--checkpoint.interval", "12", "--heartbeat", "5",
)  # fmt: skip

# A process of the run that kills itself in the exchange of a window's keys: the others
# have sent theirs, and wait for its.
KILLED_IN_AN_EXCHANGE = """
import os, runpy, signal
from shardjax.embed import key_exchange
exchange, windows = key_exchange._exchange, []
def last(*args, **options):
    windows.append(None)
    if len(windows) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(*args, **options)
key_exchange._exchange = last
runpy.run_module("experiments.ctr", run_name="__main__", alter_sys=True)
"""


def commands(folder: Path, processes: int = 2):
    """Of each process of a run, in a folder of its own."""
    port = free_port()
    return [
        [
            sys.executable, "-m", "experiments.ctr", *CTR,
            "--checkpoint.dir", str(folder / "steps"), "--out", str(folder / "out"),
            "--storage.disk", str(folder / "disk"), "--num-processes", str(processes),
            "--coordinator", f"localhost:{port}", "--process-id", str(number),
        ]
        for number in range(processes)
    ]  # fmt: skip


def result(ended) -> dict:
    assert [e.rc for e in ended] == [0, 0], [e.stderr[-2000:] for e in ended]
    assert ended[1].stdout == ""
    found = json.loads(ended[0].last)
    assert found["tiers/disk_rows"] > 0
    return {k: x for k, x in found.items() if k.startswith("eval/") or k == "steps"}


def wait_until(condition, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


def kill_when(folder: Path, victim: int, condition):
    """Starts a run, kills one of its processes when it has come to something, and returns
    how the other one ended, and how many seconds later."""
    with cluster(commands(folder)) as running:
        wait_until(condition)
        running.processes[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        ended = running.wait(60)
        seconds = time.monotonic() - killed
    other = ended[1 - victim]
    assert other.rc not in (0, None), other.stderr[-2000:]
    return other, seconds


def kill_in_an_exchange(folder: Path):
    """As `kill_when` of process 1."""
    first, second = commands(folder)
    second[1:3] = ["-c", KILLED_IN_AN_EXCHANGE]
    with cluster([first, second]) as running:
        running.wait(90, without={0})
        killed = time.monotonic()
        other, victim = running.wait(60)
        assert victim.rc == -signal.SIGKILL, victim
        return other, time.monotonic() - killed


def steps(folder: Path) -> list[str]:
    found = folder / "steps"
    return sorted(x.name for x in found.iterdir()) if found.exists() else []


def test_a_run_whose_processes_are_killed_ends_as_one_that_was_left_alone(
    tmp_path, monkeypatch
):
    # what one compiles the others need not
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    with cluster(commands(tmp_path / "alone")) as running:
        wanted = result(running.wait(120))
    folder = tmp_path / "killed"
    # before there is a checkpoint, in an exchange of keys
    other, seconds = kill_in_an_exchange(folder)
    assert other.rc == 76 and seconds < 60, other
    assert "the run cannot go on: process 1 has given no sign of life" in other.stderr
    assert steps(folder) == ["shardjax.lock"]
    # in training, with a checkpoint behind it
    other, seconds = kill_when(folder, 1, lambda: "step_12" in steps(folder))
    assert seconds < 60
    assert "the run cannot go on: process 1 has given no sign of life" in other.stderr
    assert "Start the same command in all processes again" in other.stderr
    # in a save; and process 0, whose service the others need
    before = set(steps(folder))
    other, seconds = kill_when(
        folder,
        0,
        lambda: any("partial" in x for x in set(steps(folder)) - before),
    )
    assert seconds < 60
    assert "the run cannot go on: process 0" in other.stderr
    with cluster(commands(folder)) as running:
        assert result(running.wait(120)) == wanted
    rows = read_rows(folder / "out" / "metrics.jsonl")
    assert rows and (folder / "out" / "result.json").exists()


@pytest.mark.parametrize("option", [("--seed", "1")])
def test_processes_with_other_options_are_told_so(tmp_path, option):
    first, second = commands(tmp_path)
    with cluster([first, [*second, *option]]) as running:
        ended = running.wait(60)
    for end in ended:
        assert end.rc == 1
        assert "`config.seed` is 0 in process 0 and 1 in process 1" in end.stderr
        assert "Traceback" not in end.stderr

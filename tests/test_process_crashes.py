"""Programs of several processes of which one is killed, and the same command again."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import cluster, free_port

CTR = (
    "experiments.ctr", "--mesh", "4x1", "--model.name", "lr",
    "--data.rows", "3200", "--data.eval-rows", "300",
    "--data.vocabulary", "3000", "500", "20", "--batch-size", "64",
    "--storage.device-rows", "1600", "--storage.host-bytes", "150KB",
    "--storage.lookahead", "3", "--checkpoint.interval", "12", "--heartbeat", "2",
)  # fmt: skip


def commands(folder: Path, processes: int = 2):
    """Of each process of a run, in a folder of its own."""
    port = free_port()
    return [
        [
            sys.executable, "-m", *CTR, "--checkpoint.dir", str(folder / "steps"),
            "--storage.disk", str(folder / "disk"), "--num-processes", str(processes),
            "--coordinator", f"localhost:{port}", "--process-id", str(number),
        ]
        for number in range(processes)
    ]  # fmt: skip


def result(ended) -> dict:
    assert [e.rc for e in ended] == [0, 0], [e.stderr[-2000:] for e in ended]
    assert ended[1].stdout == ""
    found = json.loads(ended[0].last)
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


def steps(folder: Path) -> list[str]:
    found = folder / "steps"
    return sorted(x.name for x in found.iterdir()) if found.exists() else []


def test_a_run_whose_processes_are_killed_ends_as_one_that_was_left_alone(tmp_path):
    with cluster(commands(tmp_path / "alone")) as running:
        wanted = result(running.wait(120))
    folder = tmp_path / "killed"
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


@pytest.mark.parametrize("option", [("--seed", "1")])
def test_processes_with_other_options_are_told_so(tmp_path, option):
    first, second = commands(tmp_path)
    with cluster([first, [*second, *option]]) as running:
        ended = running.wait(60)
    for end in ended:
        assert end.rc == 1
        assert "`config.seed` is 0 in process 0 and 1 in process 1" in end.stderr
        assert "Traceback" not in end.stderr

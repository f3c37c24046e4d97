"""A process that is killed leaves steps that are whole, and others may read meanwhile."""

import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardjax.checkpoint import StepFolder

ROOT = Path(__file__).parent.parent.parent

# Reads lines "delay calls" and answers each with a line when a fork of it, which writes
# and removes steps, has been killed: after that time, or just before that call that
# changes the folder, if it is not negative. A fork: imports take seconds.
SERVER = """
import os, random, signal, sys, time
from shardjax.checkpoint import StepFolder

def work(path, rounds):
    with StepFolder(path, write=True) as folder:
        first = max(folder.steps(), default=0) + 1
        for step in range(first, first + rounds):
            directory = folder.begin(step)
            for n in range(4):
                (directory / f"deep_{n // 2}").mkdir(exist_ok=True)
                with open(directory / f"deep_{n // 2}" / str(n), "wb") as file:
                    file.write(random.randbytes(50_000))
            before = folder.steps()[-1:] if step % 4 else []
            folder.commit(step, {"step": step}, needs=before)
            if step % 7 == 0:
                folder.begin(step + 1)
                folder.discard(step + 1)
            if step % 5 == 0:
                folder.remove(step)
            folder.prune(2)

def die_at(calls):
    left = [calls]
    def count(function):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return counted
    for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, count(getattr(os, name)))

path = sys.argv[1]
print("ready", flush=True)
for line in sys.stdin:
    delay, calls = float(line.split()[0]), int(line.split()[1])
    child = os.fork()
    if child == 0:
        random.seed(os.getpid())
        if calls >= 0:
            die_at(calls)
        work(path, 10**9 if calls < 0 else 12)
        os._exit(0)
    if calls < 0:
        time.sleep(delay)
        if delay:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture
def server(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER, str(tmp_path / "run")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def ask(server, delay, calls=-1):
    server.stdin.write(f"{delay} {calls}\n")
    server.stdin.flush()


def names(path):
    return [p.name for p in path.iterdir() if p.name != "shardjax.lock"]


def check_after_a_kill(path, caplog):
    """Whether something was left half done."""
    if not path.exists():
        return False
    with StepFolder(path, write=False) as reader:
        steps = reader.steps()
        for step in steps:
            reader.verify(step)  # and what it needs is there
        newest = reader.newest_valid()
        assert newest == (steps[-1] if steps else None)
        left = [p for p in reader.path.iterdir() if p.name.startswith(".step")]
    caplog.clear()
    with StepFolder(path, write=True) as writer:
        assert writer.steps() == steps
        assert all(name.startswith("step_") for name in names(path))
    told = f"removed {len(left)} directories that a process which was killed"
    assert (told in caplog.text) == bool(left)
    return bool(left)


def test_a_kill_at_any_time_leaves_whole_steps(server, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rng = np.random.default_rng()
    half = 0
    for _ in range(15):
        ask(server, rng.uniform(0.02, 0.3))
        assert server.stdout.readline() == "-9\n"
        half += check_after_a_kill(tmp_path / "run", caplog)
    assert half


def test_a_kill_before_any_call_leaves_whole_steps(server, tmp_path, caplog):
    """Steps, increments, removals: every call once that changes the folder."""
    caplog.set_level(logging.INFO)
    half = calls = 0
    while True:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        ask(server, 0, calls)
        code = int(server.stdout.readline())
        half += check_after_a_kill(tmp_path / "run", caplog)
        if code == 0:
            break
        assert code == -9
        calls += 1 if calls < 12 else 7
    assert calls > 100 and half > 10


def test_reading_while_another_process_writes(server, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    ask(server, 3)
    seen, told = set(), set()
    with StepFolder(path, write=False) as reader:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            seen.add(reader.newest_valid())
            for step in reader.steps():
                try:
                    assert reader.read(step).details == {"step": step}
                    reader.verify(step)
                except FileNotFoundError as error:
                    told.add(str(error))
    assert server.stdout.readline() == "-9\n"
    assert len(seen) > 3
    assert all(message.startswith("there is no step ") for message in told)

"""Starts the processes of a run on this machine, for tests of many processes."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What comes before a program that `run_cluster` starts.
HEADER = """
import os, signal, sys, time, types
import jax
import numpy as np
if {alone}:  # `processes` without the rest of the library, which takes seconds to import
    sys.modules["shardjax"] = types.ModuleType("shardjax")
    sys.modules["shardjax"].__path__ = ["shardjax"]
from shardjax import processes
INDEX, COUNT, PORT, DEVICES = map(int, sys.argv[1:5])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
def start(**options):
    processes.start_processes(f"localhost:{PORT}", COUNT, INDEX, **options)
def total():  # a sum over the devices of all processes, 276
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = jax.make_array_from_callback((24,), sharding, lambda at: np.arange(24.0)[at])
    everywhere = jax.NamedSharding(mesh, jax.P())
    return float(jax.jit(lambda x: x.sum(), out_shardings=everywhere)(x))
"""


@dataclass(frozen=True)
class Ended:
    """What became of a process.

    Attributes:
      rc: its exit code; None if it was still there after the time limit.
      stdout, stderr: what it wrote.
      seconds: from its start to its end, to some hundredths.
    """

    rc: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def last(self) -> str:
        """The last line of its output."""
        return self.stdout.splitlines()[-1] if self.stdout else ""


def free_port() -> int:
    """A port that nothing on this machine listens on."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


class Cluster:
    """Processes that run, by their number. See `cluster`."""

    def __init__(self, commands: Sequence[Sequence[str]], folder: Path):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", "")
        self._started = time.monotonic()
        self._files, self.processes = [], []
        self._ends: dict[int, float] = {}
        for number, command in enumerate(commands):
            files = [
                (folder / f"{number}.{kind}").open("w+b") for kind in ("out", "err")
            ]
            self._files.append(files)
            self.processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=files[0], stderr=files[1]
                )
            )

    def text(self, number: int, kind: int = 0) -> str:
        """What a process has written so far: to stdout (0) or stderr (1)."""
        return Path(self._files[number][kind].name).read_text(errors="replace")

    def wait_for(self, number: int, words: str, limit: float = 60.0) -> None:
        """Waits until a process has written words to stdout."""
        end = time.monotonic() + limit
        while words not in self.text(number):
            gone = self.processes[number].poll() is not None
            if (gone or time.monotonic() > end) and words not in self.text(number):
                raise AssertionError(
                    f"process {number} did not write {words!r}: {self.text(number)}"
                    f" {self.text(number, 1)}"
                )
            time.sleep(0.02)

    def wait(self, limit: float = 90.0, without: Collection[int] = ()) -> list[Ended]:
        """Waits until all have ended, but those `without`, or the limit in seconds is over."""
        end = time.monotonic() + limit
        wanted = {*range(len(self.processes))} - {*without}
        while wanted - {*self._ends} and time.monotonic() < end:
            for number, process in enumerate(self.processes):
                if number not in self._ends and process.poll() is not None:
                    self._ends[number] = time.monotonic() - self._started
            time.sleep(0.02)
        return [
            Ended(
                process.poll(),
                self.text(number),
                self.text(number, 1),
                self._ends.get(number, limit),
            )
            for number, process in enumerate(self.processes)
        ]

    def end(self) -> None:
        """Kills what still runs."""
        for process, files in zip(self.processes, self._files, strict=True):
            process.kill()
            process.wait()
            for file in files:
                file.close()


@contextlib.contextmanager
def cluster(commands: Sequence[Sequence[str]]) -> Iterator[Cluster]:
    """Runs commands side by side, from the root of the repository; kills them at the end."""
    with tempfile.TemporaryDirectory() as folder:
        running = Cluster(commands, Path(folder))
        try:
            yield running
        finally:
            running.end()


def python_commands(
    program: str,
    count: int,
    devices: int = 1,
    port: int | None = None,
    whole: bool = False,
) -> list[list[str]]:
    """Commands of the processes of a run, each with the same program after `HEADER`.

    Args:
      program: source of Python; it has INDEX, COUNT, PORT and `start()`.
      count: of processes.
      devices: that each of them simulates.
      port: of process 0; a free one without.
      whole: whether it uses more of the library than `processes`.
    """
    port = free_port() if port is None else port
    program = HEADER.replace("{alone}", str(not whole)) + program
    return [
        [sys.executable, "-c", program, *map(str, (i, count, port, devices))]
        for i in range(count)
    ]


def run_cluster(
    program: str,
    count: int,
    devices: int = 1,
    limit: float = 90.0,
    check: bool = True,
    whole: bool = False,
) -> list[Ended]:
    """Runs a program in several processes, and returns what became of each.

    Raises:
      AssertionError: with `check`, if one failed; the message is what they wrote.
    """
    with cluster(python_commands(program, count, devices, whole=whole)) as running:
        ended = running.wait(limit)
    if check:
        assert [e.rc for e in ended] == [0] * count, "\n".join(
            f"--- process {i}: {e.rc}\n{e.stdout}{e.stderr}"
            for i, e in enumerate(ended)
        )
    return ended

"""Variants of a benchmark that take turns: a process each, of which one runs at a time.

A shared machine's speed changes within a minute, so that two runs one after the other differ by
more than what is to be measured. Here all variants are set up first; then each runs a few
steps while the others are stopped, in another order each round.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import time


def in_turns(step, batches, warm, rounds, steps):
    """Of a variant: runs `warm` steps, and `steps` more whenever it is its turn.

    `step` returns something to wait for; `batches` must have some more than are run, so that
    what plans ahead has as much to do in the last round as in the others.
    """
    import jax

    stream, recent = iter(batches), []

    def run(n):
        nonlocal recent
        for _ in range(n):
            recent = [*recent[-2:], step(next(stream))]
            jax.block_until_ready(recent[0])  # at most two steps are in flight
        jax.block_until_ready(recent)

    run(warm)
    for _ in range(rounds):
        os.kill(os.getpid(), signal.SIGSTOP)
        start, cpu = time.perf_counter(), time.process_time()
        run(steps)
        taken = time.perf_counter() - start, time.process_time() - cpu
        step_ms, cpu_ms = (1e3 * x / steps for x in taken)
        print(json.dumps({"step_ms": step_ms, "cpu_ms": cpu_ms}), flush=True)


class Variant:
    """A variant's process; its command calls `in_turns` and then prints a JSON object."""

    def __init__(self, name: str, command: list[str], platform: str):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": platform},
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._wait()

    def _wait(self) -> None:
        """Waits until the process has stopped itself, or has ended."""
        status = os.waitid(
            os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT
        )
        assert status is not None  # it waits
        if status.si_code not in (os.CLD_STOPPED, os.CLD_EXITED) or (
            status.si_code == os.CLD_EXITED and status.si_status
        ):
            self._errors.seek(0)
            raise SystemExit(f"{self.name} failed:\n{self._errors.read()[-2000:]}")

    def turn(self) -> dict:
        """Lets it run its steps; returns what they took."""
        self._process.send_signal(signal.SIGCONT)
        self._wait()
        return json.loads(self._output.readline())

    def report(self) -> dict:
        """What it prints at its end."""
        return json.loads(self._output.read().splitlines()[-1])

    def kill(self) -> None:
        """Ends it, wherever it is."""
        self._process.kill()
        self._process.wait()


def take_turns(commands, rounds, platform):
    """Runs variants by turns.

    Args:
      commands: by name; each calls `in_turns` with as many rounds.

    Returns:
      By name: a list of what each turn took, and what the variant printed at its end.
    """
    variants, found = [], {name: [] for name in commands}
    order = random.Random(0)
    try:
        for name, command in commands.items():
            variants.append(Variant(name, command, platform))
        for _ in range(rounds):
            for variant in order.sample(variants, len(variants)):
                found[variant.name].append(variant.turn())
        return {v.name: (found[v.name], v.report()) for v in variants}
    finally:
        for variant in variants:
            variant.kill()

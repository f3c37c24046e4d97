"""Trains in a process that is killed again and again: see test_crashes.

Run as a script: everything is imported once, and each attempt is a fork of it.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import jax

from shardjax.checkpoint import Checkpointer
from shardjax.embed import LRU, TTL, MinCount, Storage
from tests.embed.test_snapshots import loader
from tests.embed.test_tiers import Run, batches

STEPS, KEYS = 60, 1500


def attempt(folder: Path, name: str) -> None:
    """Trains to the end, from the newest checkpoint on, and writes what came out."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    disk = folder / f"rows_{name}"
    run = Run(
        "2x1",
        "adam",
        Storage(device_rows=320, host_bytes="50KB", disk=disk),
        4,
        item={"admit": MinCount(2), "evict": (TTL(30, every=7), LRU(600, every=11))},
    )
    source = loader(run, batches(STEPS, keys=KEYS), 4)
    with Checkpointer(
        folder / name,
        interval=4,
        full_every=3,
        collection=run.collection,
        loader=source,
        last=STEPS,
    ) as checkpointer:
        step = 0
        for found in checkpointer.steps():
            checkpointer.verify(found)
        if checkpointer.steps():
            restored = checkpointer.restore(run.state)
            step, run.state = restored.step, restored.state
        checkpointer.maybe_save(step, run.state)
        while source.epoch == 0 and step < STEPS:
            for batch in source:
                run.take(batch)
                step += 1
                checkpointer.maybe_save(step, run.state)
        checkpointer.wait(run.state)
    rows = [x.tolist() for x in (*run.rows(KEYS), run.params())]
    (folder / f"{name}.json").write_text(json.dumps(rows))
    run.collection.close()


def in_fork(folder: Path, name: str, seconds: float | None) -> int | None:
    """Attempts in a process of its own; kills it after so long. Its exit code, if any."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            attempt(folder, name)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.002)


def main(folder: Path, kills: int) -> None:
    """Kills so many attempts, and compares what comes out in the end each time."""
    draw = random.Random(1)
    for name in ("whole", "killed"):  # the first one compiles
        started = time.monotonic()
        end(folder, name)
        usual = time.monotonic() - started
    killed = runs = 0
    while killed < kills:
        shutil.rmtree(folder / "killed")
        while killed < kills:
            code = in_fork(folder, "killed", draw.uniform(0.2, 1.0) * usual)
            killed += code is None
            if code == 0:
                break
            if code:
                raise SystemExit(f"an attempt has failed after {killed} kills")
        end(folder, "killed")
        whole, again = ((folder / f"{n}.json").read_text() for n in ("whole", "killed"))
        if whole != again:
            raise SystemExit(f"after {killed} kills the result differs")
        runs += 1
    print(json.dumps({"killed": killed, "runs": runs}))


def end(folder: Path, name: str) -> None:
    """An attempt that nobody kills."""
    if in_fork(folder, name, None):
        raise SystemExit("an attempt that nobody kills has failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""Saves of several processes that are asked to end, or of which one cannot write."""

import json

import pytest

from shardjax.checkpoint import StepFolder
from tests.cluster import run_cluster

PROGRAM = """
import dataclasses, json, resource
from pathlib import Path
from experiments.checkpoints import CheckpointConfig, Checkpoints
from shardjax.checkpoint import Checkpointer, StepFolder

FOLDER = Path({folder!r})
FOLDER.mkdir(exist_ok=True)

@dataclasses.dataclass
class Config:
    checkpoint: CheckpointConfig
    resume: str = "auto"

def run(first, end):  # what happens in process 1 in the third step
    config = Config(CheckpointConfig(dir=FOLDER / "run", interval="4"))
    with Checkpoints(config, 30) as checkpoints, checkpoints.catch_sigterm():
        step, now, _ = checkpoints.begin(state)
        assert step == first
        while step < 30:
            step += 1
            if step == first + 3 and INDEX:
                end()
            checkpoints.after(step, now, dict)
        checkpoints.end(now)

start()
mesh = jax.make_mesh((jax.device_count(),), ("x",))
sharding = jax.NamedSharding(mesh, jax.P("x"))
values = np.random.default_rng(0).random((2, 100_000))
state = jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])
with processes.watch():
    try:
        Checkpointer(FOLDER / f"of{{INDEX}}")
    except (OSError, RuntimeError) as error:
        print(json.dumps(str(error)))
    try:
        run(0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    except SystemExit as error:
        print(json.dumps([error.code, max(StepFolder(FOLDER / "run", write=False).steps())]))
    # the disk is full for process 1: files of some KB can be written, no larger ones
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
    print(json.dumps("the last run"), flush=True)
    run(8, limit)
"""


@pytest.mark.multiprocess
def test_processes_end_together_when_one_has_to(tmp_path):
    program = PROGRAM.format(folder=str(tmp_path))
    ended = run_cluster(program, 2, 1, limit=60, check=False, whole=True)
    for process in ended:
        assert process.rc in (1, 76), process
        lines = [x for x in process.stdout.splitlines() if x[0] in '"[' and x[1] != "G"]
        unshared, stopped, _ = map(json.loads, lines)
        assert "checkpoints need a folder that all processes share" in unshared
        assert f"'{tmp_path}/of1' is not there for process 1" in unshared
        # SIGTERM to one: all look every 8 steps, save, and end
        assert stopped == [75, 8]
    first, second = ended
    assert "OSError: the arrays of" in second.stderr
    assert "File too large" in second.stderr
    told = "process 1 failed: OSError: the arrays of", "process 1 has failed: OSError"
    assert any(x in first.stderr for x in told), first.stderr
    assert abs(first.seconds - second.seconds) < 20
    # a step of which a process cannot write its part is none, and the run has ended
    with StepFolder(tmp_path / "run", write=False) as run:
        assert run.steps() == [4, 8]
        for step in run.steps():
            run.verify(step)

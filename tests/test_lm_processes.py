"""The language model program in several processes gives what it gives in one."""

import json
import sys

import numpy as np
import tensorboardX  # noqa: F401  its import sets an environment variable

from experiments import lm
from shardjax.writers import read_rows
from tests.cluster import cluster, free_port
from tests.test_lm import text as text

VALUES = {"size": "tiny", "batch_size": 8, "seq_len": 32, "steps": 6, "log_every": 2}
VALUES |= {"eval_batch_size": 32, "mesh": "8x1"}


def commands(text, count, **changes):
    """The commands of the processes of a run."""
    values = {**VALUES, "coordinator": f"localhost:{free_port()}", **changes}
    options = [f"--{k.replace('_', '-')}={v}" for k, v in values.items()]
    options += [f"--data.path={text['path']}", f"--data.held-out={text['held_out']}"]
    options += [f"--num-processes={count}"]
    command = [sys.executable, "-m", "experiments.lm", *options]
    return [[*command, f"--process-id={i}"] for i in range(count)]


def test_the_command_over_processes(text, tmp_path):
    alone = lm.main(lm.from_anything({**VALUES, "zero": 3, "data": text}))
    with cluster(commands(text, 2, zero=3, out=tmp_path / "out")) as running:
        first, second = running.wait(200)
    assert first.rc == second.rc == 0, first.stderr + second.stderr
    found = json.loads(first.last)
    assert second.stdout == ""
    assert "step 6/6" in first.stderr and "step 6/6" not in second.stderr
    assert "simulating 4 devices on the CPU of this host" in first.stderr
    for name in ("train/loss", "eval/loss"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-6)
    for name in ("devices", "mesh", "eval/bytes", "bytes_per_device"):
        assert found[name] == alone[name]
    rows = read_rows(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6, 6]
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == found

"""Programs that go on after they were stopped: the same bits as if they never had been."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401  its import sets an environment variable

from experiments import ctr, lm
from experiments.checkpoints import Checkpoints
from experiments.output import claim, open_writers
from shardjax import processes
from shardjax.checkpoint import PREEMPTED, StepFolder

ROOT = Path(__file__).parent.parent
CTR = {
    "batch_size": 64,
    "steps": 60,
    "log_every": 20,
    "data": {"rows": 2500, "eval_rows": 1000},
    "optim": {"rows": "adam"},
    "storage": {"device_rows": 1200, "host_bytes": "100KB", "lookahead": 4},
    "admit": {"min_count": 2},
    "evict": {"ttl": 25, "every": 10},
}
LM = {
    "mesh": "2x1",
    "size": "tiny",
    "batch_size": 8,
    "seq_len": 16,
    "microbatches": 2,
    "steps": 30,
    "log_every": 10,
    "eval_batch_size": 32,
}
TIMES = ("seconds", "_s", "_ms", "overhead", "slow", "interval", "mfu")


class Stopped(Exception):
    """What ends a run in the middle."""


def stop_at(monkeypatch, last):
    """Lets the next run end with `Stopped` after a step."""
    after = Checkpoints.after

    def until(self, step, state, extra):
        after(self, step, state, extra)
        if step == last:
            monkeypatch.undo()
            raise Stopped

    monkeypatch.setattr(Checkpoints, "after", until)


def comparable(result):
    """What does not depend on how long things took, or where rows lie."""
    places = ("hits", "rows", "windows", "moved", "tier", "disk", "checkpoint", "bytes")
    return {
        k: v
        for k, v in result.items()
        if not any(t in k for t in TIMES) and not any(p in k for p in places)
    }


# in a window; in the second epoch
@pytest.mark.parametrize(("mesh", "stop"), [("8x1", 25), ("1x1", 53)])
def test_ctr_with_tiers_and_policies_goes_on_to_the_bit(
    mesh, stop, tmp_path, monkeypatch
):
    values = CTR | {"mesh": mesh, "epochs": 2}

    def config(name, **more):
        storage = values["storage"] | {"disk": str(tmp_path / f"rows_{name}")}
        return ctr.from_anything(values | {"storage": storage} | more)

    whole = ctr.main(config("a"))
    saving = {
        "checkpoint": {"dir": str(tmp_path / "ckpt"), "interval": "11"},
        "out": str(tmp_path / "out"),
    }
    stop_at(monkeypatch, stop)
    with pytest.raises(Stopped):
        ctr.main(config("b", **saving))
    found = ctr.main(config("c", **saving))
    assert comparable(found) == comparable(whole)
    assert found["planner/evicted_rows"] > 0
    folder = StepFolder(tmp_path / "ckpt", write=False)
    assert folder.steps() == [44, 55, 60]
    assert folder.read(60).details["config"]["steps"] == 60
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-2:] == [60, 60]
    again = ctr.main(config("d", **saving))  # nothing is left to do
    assert comparable(again)["eval/auc"] == whole["eval/auc"]


@pytest.mark.parametrize(
    ("program", "values", "names"),
    [
        (ctr, {}, {"rows", "eval_rows", "features", "bags", "n_dense"}),
        (lm, LM, {"bytes", "crc32", "held_out"}),
    ],
)
def test_processes_with_other_data_are_told_so(
    program, values, names, text, monkeypatch
):
    def differ(what):
        assert what["data"].keys() == names and None not in what["data"].values()
        raise ValueError("`data` differs")

    monkeypatch.setattr(processes, "check_agreement", differ)
    data = {"rows": 900, "eval_rows": 90} if program is ctr else text
    with pytest.raises(
        ValueError, match="`data` differs. The files of --data.path are"
    ):
        program.main(program.from_anything(values | {"data": data}))


@pytest.mark.parametrize("program", [ctr, lm])
def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_again(
    program, tmp_path
):
    out, steps = tmp_path / "out", tmp_path / "steps"

    def config(**more):
        values = {"out": str(out), "checkpoint": {"dir": str(steps)}, **more}
        return program.from_anything(values)

    def start(config):
        goes_on = claim(config)
        with open_writers(config.out, config, goes_on) as writer:
            writer.write(1, {"train/loss": 1.0})
        return goes_on

    assert not start(config())
    assert start(config())  # the later of two lines with a step holds
    assert start(config(num_processes=2, coordinator="a:1", process_id=0))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 1]
    kept = {x.name: x.read_bytes() for x in out.iterdir()}
    others = [
        config(seed=1),
        config(checkpoint={}),  # whose command would not go on with it later either
        config(checkpoint={"dir": str(tmp_path / "others")}),
        config(resume="none"),
    ]
    (out / "result.json").touch()  # a run that has ended, whose checkpoints are gone
    for other in (config(), *others):
        with pytest.raises(FileExistsError, match="has a run in it already"):
            claim(other)
    (out / "result.json").unlink()
    for other in others:
        with pytest.raises(FileExistsError, match="has a run in it already"):
            claim(other)
    assert {x.name: x.read_bytes() for x in out.iterdir()} == kept


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A little text, of which 30 steps read a part, and its options."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(12):
        words = draw.choices(("ab ", "cde ", "fghi\n"), k=300)
        (folder / f"{number}.txt").write_text("".join(words))
    return {"path": str(folder / "*.txt"), "held_out": 0.3}


@pytest.mark.parametrize("stage", [0, 3])
def test_lm_goes_on_to_the_bit_and_refuses_other_steps(
    stage, text, tmp_path, monkeypatch
):
    values = LM | {"zero": stage, "data": text}
    whole = lm.main(lm.from_anything(values))
    saving = values | {"checkpoint": {"dir": str(tmp_path / "steps"), "interval": "5"}}
    stop_at(monkeypatch, 13)
    with pytest.raises(Stopped):
        lm.main(lm.from_anything(saving))
    found = lm.main(lm.from_anything(saving))
    assert comparable(found) == comparable(whole)
    with pytest.raises(FileExistsError, match="begins anew"):
        lm.main(lm.from_anything(saving | {"resume": "none"}))
    with pytest.raises(FileNotFoundError, match="no step 7"):
        lm.main(lm.from_anything(saving | {"resume": "7"}))
    if stage == 3:  # the same weights on another mesh, at another stage
        more = {"mesh": "1x2", "zero": 1, "steps": 33}
        steps = Path(shutil.copytree(tmp_path / "steps", tmp_path / "copy"))
        moved = saving | more | {"checkpoint": {"dir": str(steps)}}
        there = lm.main(lm.from_anything(saving | {"steps": 33}))
        elsewhere = lm.main(lm.from_anything(moved))
        assert elsewhere["eval/loss"] == pytest.approx(there["eval/loss"], rel=1e-5)


def test_a_disk_that_is_full_does_not_end_a_run(text, tmp_path, monkeypatch, caplog):
    commit, calls = StepFolder.commit, []

    def full(self, step, *args):
        calls.append(step)
        if step == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        commit(self, step, *args)

    monkeypatch.setattr(StepFolder, "commit", full)
    saving = {"checkpoint": {"dir": str(tmp_path / "steps"), "interval": "10"}}
    result = lm.main(lm.from_anything(LM | {"data": text} | saving))
    assert calls == [10, 20, 30]
    assert "a save has failed, and training goes on: [Errno 28]" in caplog.text
    folder = StepFolder(tmp_path / "steps", write=False)
    assert folder.steps() == [10, 30]
    for step in folder.steps():
        folder.verify(step)
    assert result["checkpoint/failures"] == 1


def test_sigterm_saves_and_ends_with_its_code_and_the_same_command_goes_on(tmp_path):
    steps, folder = tmp_path / "steps", tmp_path / "out"
    command = [
        sys.executable, "-m", "experiments.ctr", "--batch-size", "64", "--steps", "800",
        "--data.rows", "60000", "--data.eval-rows", "1000", "--log-every", "50",
        "--checkpoint.dir", str(steps), "--checkpoint.interval", "none",
        "--storage.device-rows", "4000", "--admit.min-count", "2", "--out", str(folder),
    ]  # fmt: skip
    # the second process need not compile what the first one has
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = folder / "metrics.jsonl"
    while process.poll() is None and not (lines.exists() and lines.stat().st_size):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == PREEMPTED, err
    assert out == ""
    assert "the run ends as SIGTERM asks for" in err
    [step] = StepFolder(steps, write=False).steps()
    assert 50 <= step < 800
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert f"goes on after step {step}" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 800


def test_a_run_that_is_to_be_shorter_or_other_than_it_was(text, tmp_path, caplog):
    config = LM | {"data": text, "mesh": "1x1", "steps": 4}
    config |= {"checkpoint": {"dir": tmp_path / "steps"}}
    lm.main(lm.from_anything(config))
    with pytest.raises(ValueError, match="ask for 3 steps, and the run .* has taken 4"):
        lm.main(lm.from_anything(config | {"steps": 3}))
    lm.main(lm.from_anything(config | {"steps": 5, "seed": 7}))
    assert "`seed` was 0 when step 4 was saved, now 7" in caplog.text
    assert "`steps` was 4 when step 4 was saved, now 5" in caplog.text
    assert "`mesh` was" not in caplog.text


def test_options_that_make_no_sense():
    for values, message in (
        ({"resume": "latest"}, "auto, none or the number of a step"),
        ({"resume": "none"}, "no effect without `checkpoint.dir`"),
        ({"checkpoint": {"keep": 2}}, "no effect without `dir`"),
        ({"checkpoint": {"dir": "x", "interval": "5 parsecs"}}, "interval of saves"),
        ({"checkpoint": {"dir": "x", "keep": 0}}, "`keep` must be at least 1"),
        (
            {"checkpoint": {"dir": "x", "full_every": 0}},
            "`full_every` must be at least",
        ),
    ):
        for program in (ctr, lm):
            with pytest.raises(ValueError, match=message):
                program.from_anything(values)
    tables = {"checkpoint": {"dir": "x", "full_every": 2}}
    with pytest.raises(ValueError, match="no effect without embedding tables"):
        lm.from_anything(tables)
    assert ctr.from_anything(tables).checkpoint.full_every == 2

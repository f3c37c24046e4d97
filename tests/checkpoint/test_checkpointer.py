"""A run that goes on from a checkpoint ends with the bits of one that never stopped."""

import errno
import os
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from shardjax.checkpoint import Checkpointer, CorruptCheckpointError
from shardjax.embed.disk_rows import DiskRows
from shardjax.embed.snapshot import Snapshot
from tests.checkpoint.saving import fail_at
from tests.embed.test_snapshots import POLICIES, loader, storage_of
from tests.embed.test_tiers import Run, assert_same, batches

STEPS, EVERY = 40, 9


def train(
    run, made, window, folder, *, interval=EVERY, stop=None, resume=False, **more
):
    """Trains on all batches, or until a step; returns at which step it began."""
    source = loader(run, made, window)
    with Checkpointer(
        folder, interval=interval, collection=run.collection, loader=source, **more
    ) as checkpointer:
        step = 0
        if resume:
            found = checkpointer.restore(run.state)
            step, run.state = found.step, found.state
            run.losses = found.extra["losses"]
        first = step
        checkpointer.maybe_save(step, run.state)
        for batch in source:
            run.take(batch)
            step += 1
            checkpointer.maybe_save(step, run.state, {"losses": run.losses})
            if step == stop:
                break
        checkpointer.close(run.state)
    return first


@pytest.mark.parametrize(
    ("mesh", "kind", "policy", "window", "full_every"),
    [
        ("1x1", "disk", "evict", 3, 3),
        ("8x1", "disk", "count", 7, 9),
        ("8x1", "RAM", "show_click", 1, 2),
        ("1x1", "devices", "filter", 50, 1),
        ("4x2", "devices", "none", 4, 9),
    ],
)
def test_resuming_changes_no_bit(mesh, kind, policy, window, full_every, tmp_path):
    made = batches(STEPS)
    more = {"item": POLICIES[policy]}

    def run(name):
        return Run(mesh, "adam", storage_of(kind, tmp_path / name), window, **more)

    whole, half = run("a"), run("b")
    train(whole, made, window, tmp_path / "whole", interval="none")
    how = {"full_every": full_every}
    train(half, made, window, tmp_path / "ckpt", stop=25, **how)
    half.collection.close()
    again = run("c")
    assert train(again, made, window, tmp_path / "ckpt", resume=True, **how) == 18
    assert_same(whole, again)
    for table in ("user", "item"):
        keys = [np.sort(x.collection.keys(table)) for x in (whole, again)]
        np.testing.assert_array_equal(*keys)
    with Checkpointer(tmp_path / "ckpt") as checkpointer:
        assert checkpointer.steps() == [18, 27, 36]
        for step in checkpointer.steps():
            checkpointer.verify(step)
    for x in (whole, again):
        x.collection.close()


def test_a_save_while_files_are_merged(tmp_path, monkeypatch):
    made = batches(STEPS, keys=1500, power=0.3)
    merge, hold = DiskRows._compact, DiskRows.hold
    merging, held, found = threading.Event(), threading.Event(), []

    def slow(self, *args, **how):
        merging.set()
        assert held.wait(60)
        merge(self, *args, **how)

    def watched(self):
        assert self._compacting is None and len(self.segments) > 1
        self._compacting = self._compactor.submit(self._compact, list(self.segments))
        assert merging.wait(60)
        found.append(len(self))
        parts = hold(self)
        held.set()
        return parts

    def run(name):
        return Run("1x1", "adam", storage_of("disk", tmp_path / name), 4)

    whole, half = run("a"), run("b")
    train(whole, made, 4, tmp_path / "whole", interval="none")
    with monkeypatch.context() as patch:
        patch.setattr(DiskRows, "_compact", slow)
        patch.setattr(DiskRows, "hold", watched)
        train(half, made, 4, tmp_path / "ckpt", interval=20, stop=25)
    assert half.collection.planner.tiers[0].disk.compactions
    assert len(found) == 1 and found[0] > 0
    half.collection.close()
    again = run("c")
    assert train(again, made, 4, tmp_path / "ckpt", interval=20, resume=True) == 20
    assert_same(whole, again)
    for x in (whole, again):
        x.collection.close()


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [("1x1", "devices"), ("4x2", "RAM"), ("2x4", "disk"), ("3x1", "RAM")],
)
def test_rows_are_restored_on_another_mesh_and_elsewhere(mesh, kind, tmp_path):
    made = batches(STEPS)
    whole = Run("8x1", "adam", storage_of("disk", tmp_path / "a"), 3)
    train(whole, made, 3, tmp_path / "ckpt", interval=20)
    again = Run(mesh, "adam", storage_of(kind, tmp_path / "b"), 5)
    with Checkpointer(tmp_path / "ckpt", collection=again.collection) as checkpointer:
        found = checkpointer.restore(again.state, 40)
    again.state = found.state
    np.testing.assert_array_equal(again.params(), whole.params())
    for a, b in zip(whole.rows(), again.rows(), strict=True):
        np.testing.assert_array_equal(a, b)
    more = batches(5, seed=3)
    for x in (whole, again):
        x.losses = []
        x.train(more)
        x.collection.close()
    np.testing.assert_allclose(whole.losses, again.losses, rtol=1e-5)


def test_a_save_at_any_step_of_a_loop_without_memory(tmp_path, monkeypatch):
    made = batches(12)
    run = Run("2x1", "adam", None, 3)
    rows = None
    with Checkpointer(tmp_path, collection=run.collection) as checkpointer:
        with monkeypatch.context() as patch:  # only what is in the way is read
            patch.setattr(Snapshot, "_sweep", lambda self, g, slab: None)
            for n, batch in enumerate(loader(run, made, 3), 1):
                run.take(batch)
                if n == 5:
                    checkpointer.save(n, run.state)
                    rows = run.rows()
        with pytest.raises(ValueError, match="training has gone on since"):
            checkpointer.wait()
        checkpointer.wait(run.state)
        again = Run("1x1", "adam")
    with Checkpointer(tmp_path, collection=again.collection) as checkpointer:
        again.state = checkpointer.restore(again.state).state
    for a, b in zip(rows, again.rows(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_save_that_nobody_announced_is_refused(tmp_path):
    run = Run("1x1", "adam", storage_of("RAM", None), 3)
    with Checkpointer(tmp_path, collection=run.collection) as checkpointer:
        for n, batch in enumerate(loader(run, batches(12), 3), 1):
            run.take(batch)
            if n == 1:
                with pytest.raises(
                    RuntimeError, match="more have been planned.*Announce"
                ):
                    checkpointer.save(n, run.state)
                break
        assert checkpointer.steps() == []
        assert not list(tmp_path.glob(".step*"))


def test_a_failed_write_is_raised_once_and_the_next_save_is_good(tmp_path, monkeypatch):
    state = {"w": jax.numpy.arange(4.0)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        commit = checkpointer._folder.commit

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpointer._folder, "commit", full)
        checkpointer.save(2, state)
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(3, state)
        monkeypatch.setattr(checkpointer._folder, "commit", commit)
        assert checkpointer.steps() == [1]
        checkpointer.save(3, state)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]


def test_a_save_that_failed_does_not_cost_the_next_one(tmp_path, monkeypatch):
    state = {"w": jax.numpy.arange(4.0)}
    with Checkpointer(tmp_path, interval=2) as checkpointer:
        checkpointer.maybe_save(0, state)
        with monkeypatch.context() as patch:

            def full(*args):
                raise OSError(28, "No space left on device")

            patch.setattr(checkpointer._folder, "commit", full)
            assert not checkpointer.maybe_save(1, state)
            assert checkpointer.maybe_save(2, state)
            assert checkpointer._save is not None and checkpointer._save.thread
            checkpointer._save.thread.join()
        with pytest.raises(OSError, match="No space left"):
            checkpointer.maybe_save(3, state)
        assert checkpointer.maybe_save(4, state)
        checkpointer.wait()
        assert checkpointer.steps() == [4]
        assert checkpointer.policy.figures()["failures"] == 0


def test_the_last_step_is_saved_whatever_the_interval(tmp_path):
    state = {"w": jax.numpy.arange(4.0)}
    with Checkpointer(tmp_path, interval="none", last=3) as checkpointer:
        begun = [checkpointer.maybe_save(step, state) for step in range(4)]
        checkpointer.wait()
        assert begun == [False, False, False, True] and checkpointer.steps() == [3]


def test_extra_is_what_it_was_at_the_save(tmp_path):
    state, extra = {"w": jax.numpy.arange(4.0)}, {"losses": [1.0]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, extra)
        extra["losses"].append(2.0)
        checkpointer.wait()
        assert checkpointer.restore(state).extra == {"losses": [1.0]}
        with pytest.raises(ValueError, match="details"):
            checkpointer.save(2, state, {"loss": float("nan")})
    with pytest.raises(TypeError, match="details"):
        Checkpointer(tmp_path / "b", config={"path": tmp_path})


def test_a_corrupt_step_is_an_error_or_passed_over(tmp_path):
    state = {"w": jax.numpy.arange(4.0)}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": state["w"] + step})
        checkpointer.wait()
        for file in (tmp_path / "step_2" / "arrays").rglob("*"):
            if file.is_file() and file.stat().st_size:
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(bytes(data))
                break
        with pytest.raises(CorruptCheckpointError, match="step 2"):
            checkpointer.restore(state)
        with pytest.raises(CorruptCheckpointError, match="step 2"):
            checkpointer.restore(state, 2)
        found = checkpointer.restore(state, on_corrupt="fallback")
        assert (found.step, found.state["w"][0]) == (1, 1)


def test_a_run_that_goes_back_leaves_later_steps_behind(tmp_path, caplog):
    """The next start goes on from the newest step of the new branch."""

    def value(step):
        return {"w": jax.numpy.full(4, float(step))}

    with Checkpointer(tmp_path, interval=5, keep=None) as checkpointer:
        for step in range(16):
            checkpointer.maybe_save(step, value(step))
    for number in (1, 2):
        with Checkpointer(tmp_path, interval=5, keep=None) as checkpointer:
            assert checkpointer.restore(value(0), 5).step == 5
            assert checkpointer.steps() == [5, 10, 15]  # looking changes nothing
            for step in range(5, 11):
                checkpointer.maybe_save(step, value(step + 100 * number))
            checkpointer.wait()
            assert checkpointer.steps() == [5, 10]
            for step in range(11, 16):
                checkpointer.maybe_save(step, value(step + 100 * number))
        with Checkpointer(tmp_path) as checkpointer:
            found = checkpointer.restore(value(0))
        assert (found.step, found.state["w"][0]) == (15, 15 + 100 * number)
    left = sorted(p.name for p in tmp_path.glob("left_*"))
    assert left == [f"left_step_{x}" for x in ("10", "10.2", "15", "15.2")]
    assert "has gone back to a step before 15" in caplog.text
    with Checkpointer(tmp_path) as checkpointer:  # as nobody has gone back
        with pytest.raises(
            FileExistsError, match=r"ascending order, .* steps \[15\] af"
        ):
            checkpointer.save(12, value(12))
        with pytest.raises(FileExistsError, match="step 15 .* committed already"):
            checkpointer.save(15, value(15))


def test_a_save_that_is_refused_changes_nothing(tmp_path):
    state = {"w": jax.numpy.ones(4)}
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state)
        checkpointer.wait()
        for step, error in ((-1, ValueError), (2.5, TypeError), ("x", TypeError)):
            with pytest.raises(error, match="a step must"):
                checkpointer.save(step, state)
        for step in (5, 20, 30):
            with pytest.raises(
                FileExistsError, match="ascending order|committed already"
            ):
                checkpointer.save(step, state)
        checkpointer.save(40, state)
        checkpointer.wait()
        assert checkpointer.steps() == [10, 20, 30, 40]
        checkpointer.restore(state, 20)
        for step in (15, 20):
            with pytest.raises(
                FileExistsError, match="ascending order|committed already"
            ):
                checkpointer.save(step, state)
        assert checkpointer.steps() == [10, 20, 30, 40]
        checkpointer.save(21, state)
        checkpointer.save(22, state)
        checkpointer.wait()
        assert checkpointer.steps() == [10, 20, 21, 22]


def test_the_last_step_can_be_saved_again_if_that_has_failed(tmp_path, monkeypatch):
    state = {"w": jax.numpy.ones(4)}
    with Checkpointer(tmp_path, last=3) as checkpointer:
        checkpointer.maybe_save(2, state)
        with monkeypatch.context() as patch:
            fail_at(patch, "fsync", errno.ENOSPC)
            assert checkpointer.maybe_save(3, state)
            with pytest.raises(OSError, match="No space left"):
                checkpointer.wait()
        assert checkpointer.steps() == []
        assert checkpointer.maybe_save(3, state)
        checkpointer.wait()
        assert checkpointer.steps() == [3]


def test_a_process_with_one_device_looks_at_what_eight_have_saved(tmp_path):
    run = Run("8x1", "adam")
    run.train(batches(2))
    with Checkpointer(tmp_path, collection=run.collection) as checkpointer:
        checkpointer.save(2, run.state)
        checkpointer.wait()
    program = """
import sys
import jax
from shardjax.checkpoint import Checkpointer
from shardjax.checkpoint.__main__ import main
assert jax.device_count() == 1
[path] = sys.argv[1:]
assert main(["inspect", path, "--step", "2"]) == main(["verify", path]) == 0
with Checkpointer(path) as checkpointer:
    print(sorted(checkpointer.inspect(2).details["arrays"]))
"""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "params/" in done.stdout and "step 2: ok" in done.stdout


def test_a_step_that_is_there_is_no_failed_save_if_old_ones_cannot_go(
    tmp_path, monkeypatch, caplog
):
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"w": jax.numpy.ones(4)})
        checkpointer.wait()
        monkeypatch.setattr(
            shutil,
            "rmtree",
            lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "no")),
        )
        checkpointer.save(2, {"w": jax.numpy.ones(4)})
        checkpointer.wait()
        assert checkpointer.restore({"w": jax.numpy.ones(4)}).step == 2
    assert "older steps" in caplog.text


def test_messages(tmp_path):
    state = {"w": jax.numpy.arange(4.0)}
    for name, number in (("keep", 0), ("keep", 2.5), ("last", "9"), ("last", True)):
        with pytest.raises(
            ValueError, match=f"`{name}` .* integer of at least 1, or No"
        ):
            Checkpointer(tmp_path, **{name: number})
    with Checkpointer(tmp_path / "a") as checkpointer:
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
            checkpointer.restore(state)
        checkpointer.save(1, state)
        checkpointer.wait()
        with pytest.raises(FileExistsError, match="step 1"):
            checkpointer.save(1, state)
        with pytest.raises(FileNotFoundError, match="no step 7"):
            checkpointer.restore(state, 7)
        with pytest.raises(TypeError, match="`ignore` must be a sequence, got the str"):
            checkpointer.restore(state, ignore="opt_state/*")
    run = Run("1x1", "adam")
    with Checkpointer(tmp_path / "a", collection=run.collection) as checkpointer:
        with pytest.raises(ValueError, match="has embedding tables and the"):
            checkpointer.restore(run.state)
    with Checkpointer(tmp_path / "b", collection=run.collection) as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.wait()
    source = loader(run, batches(3), 1)
    other = Run("1x1", "sgd", item={"capacity": 9})
    with Checkpointer(
        tmp_path / "b", collection=other.collection, loader=source
    ) as checkpointer:
        with pytest.raises(ValueError, match="optimizer state per row of table"):
            checkpointer.restore(other.state)
    with Checkpointer(
        tmp_path / "b", collection=run.collection, loader=source
    ) as checkpointer:
        with pytest.raises(ValueError, match="saved without a loader"):
            checkpointer.restore(run.state)
    assert threading.active_count() < 50

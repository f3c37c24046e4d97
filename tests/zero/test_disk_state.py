"""State on disk: the same numbers as in memory, and what goes wrong with files."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import shardjax as sj
from shardjax import zero
from shardjax.precision import LossScaling, Precision
from tests.helpers import run_python
from tests.zero.small import distance, make_loss, plan_small, small_params, train
from tests.zero.test_offload import OPTIMIZERS, assert_equal, even_batch

pytestmark = pytest.mark.usefixtures("optimized")

ADAMW = OPTIMIZERS["adamw"]
GROUP = 9_000  # bytes: a layer of the small network's Adam, two of its momentum


def open_disk(folder, tx=ADAMW, mesh="2x1", stage=1, **options):
    return zero.DiskOptimizer(
        tx, plan_small(mesh, stage, tx), folder, **{"group_bytes": GROUP} | options
    )


def train_on_disk(optimizer, steps, state=None, first=0, **options):
    state = optimizer.init_state(small_params()) if state is None else state
    step = zero.make_disk_step(make_loss(), optimizer, **options)
    infos = []
    for i in range(first, first + steps):
        state, info = step(state, even_batch(i))
        infos.append({k: float(v) for k, v in info.items()})
    return state, infos


@pytest.mark.parametrize(
    ("optimizer", "mesh", "stage", "prefetch"),
    [
        ("adamw", "2x1", 1, True),
        ("adamw", "2x1", 3, False),
        ("adamw", "4x1", 3, True),
        ("momentum", "4x1", 1, False),
        ("momentum", "2x1", 3, True),
        ("adamw", "2x1", 0, True),
    ],
)
def test_the_disk_changes_no_bit(tmp_path, optimizer, mesh, stage, prefetch):
    tx = OPTIMIZERS[optimizer]
    plain, infos = train(
        plan_small(mesh, stage, tx), tx, steps=6, microbatches=2, batch=even_batch
    )
    with open_disk(tmp_path, tx, mesh, stage, prefetch=prefetch) as disk:
        assert len(disk.groups) > 2
        state, same = train_on_disk(disk, 6, microbatches=2)
        assert_equal(state.params, plain.params)
        assert_equal(disk.read(state), plain.opt_state)
        size = os.path.getsize(next(tmp_path.glob("*.shardjax-state")))
        for x, leaf in zip(
            jax.tree.leaves(state.params), disk.plan.leaves, strict=True
        ):
            assert x.sharding.is_equivalent_to(
                jax.NamedSharding(disk.plan.mesh, leaf.spec), x.ndim
            )
    assert not list(tmp_path.glob("*.shardjax-state"))
    for info, more in zip(infos, same, strict=True):
        assert info == {k: v for k, v in more.items() if "disk" not in k}
    read = sum(more["disk_read_bytes"] for more in same)
    written = sum(more["disk_written_bytes"] for more in same)
    if prefetch:
        # the last step ends while one group is read ahead and one still written
        assert 6 * size <= read <= 7 * size
        assert 5 * size < written <= 6 * size
        assert sum(m["disk_read_bytes"] for m in same[:2]) >= 2 * size
    else:
        assert read == written == 6 * size
    assert all(more["disk_wait_s"] >= 0 for more in same)


def test_state_goes_on_where_it_was_read(tmp_path):
    with open_disk(tmp_path / "a") as disk:
        state, _ = train_on_disk(disk, 2)
        kept = jax.device_get((state.params, disk.read(state)))
        expected, _ = train_on_disk(disk, 2, state, first=2)
        expected = jax.device_get(expected.params)
    with open_disk(tmp_path / "b", mesh="4x1", group_bytes=10**9) as disk:
        state = disk.init_state(*kept)
        assert_equal(disk.read(state), kept[1])
    with open_disk(tmp_path / "b") as disk:
        state, _ = train_on_disk(disk, 2, disk.init_state(*kept), first=2)
        assert_equal(state.params, expected)


def test_a_step_that_overflows_touches_no_file(tmp_path):
    precision = Precision(np.float16, scaling=LossScaling(2.0**10))
    plan = plan_small("2x1", 1, ADAMW, precision=precision)

    def loss(params, batch):
        total, weight = make_loss()(params, batch)
        return total * np.inf, weight

    with zero.DiskOptimizer(ADAMW, plan, tmp_path) as disk:
        state = disk.init_state(small_params())
        before = jax.device_get(disk.read(state))
        written = disk.traffic.written_bytes
        state, info = zero.make_disk_step(loss, disk)(state, even_batch(0))
        assert_equal(disk.read(state), before)
        assert disk.traffic.written_bytes == written
    assert distance(state.params, small_params()) == 0
    assert int(info["skipped"]) == 1
    assert float(state.loss_scale.scale) == 2.0**9
    assert int(state.step) == 1


def refuses(disk, state, match):
    with pytest.raises(zero.DiskStateError, match=match):
        train_on_disk(disk, 1, state)
    with pytest.raises(zero.DiskStateError, match=match):
        disk.read(state)


def test_a_file_that_was_cut_off(tmp_path):
    with open_disk(tmp_path, prefetch=False) as disk:
        state, _ = train_on_disk(disk, 1)
        os.truncate(next(tmp_path.glob("*.shardjax-state")), 20_000)
        with pytest.raises(
            zero.DiskStateError, match=r"must have \d+ bytes, but ends at 20000: some"
        ):
            train_on_disk(disk, 1, state)
        refuses(disk, state, "failed in the middle of an update")
        state, _ = train_on_disk(disk, 1)  # new state helps


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_full_disk(tmp_path, monkeypatch, prefetch):
    plain = os.pwrite

    def full(file, data, offset):
        if offset > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(file, data, offset)

    with open_disk(tmp_path, prefetch=prefetch) as disk:
        state, _ = train_on_disk(disk, 1)
        disk.flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match=r"only \d+ fit into .*No space left"):
                _train_and_flush(disk, state)
        refuses(disk, state, "failed in the middle of an update")
    with open_disk(tmp_path, prefetch=prefetch) as disk:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match="Free space, or"):
                _init_and_flush(disk)
        with pytest.raises(zero.DiskStateError, match="failed"):
            disk.check()


def _train_and_flush(disk, state):
    """What a thread still writes when a step ends fails at the flush at the latest."""
    train_on_disk(disk, 1, state)
    disk.flush()


def _init_and_flush(disk):
    disk.init_state(small_params())
    disk.flush()


def test_an_interrupt_in_an_update_is_noticed(tmp_path, monkeypatch):
    with open_disk(tmp_path) as disk:
        state, _ = train_on_disk(disk, 1)

        def interrupted(number):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(disk, "_update_fn", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_on_disk(disk, 1, state)
        refuses(disk, state, "failed in the middle of an update")


def test_without_state_and_after_the_end(tmp_path):
    disk = open_disk(tmp_path)
    plan = plan_small("2x1", 1, ADAMW)
    state = zero.init_state(small_params(), ADAMW, plan)
    refuses(disk, state, "has no state yet. Call its `init_state` first")
    disk.close()
    disk.close()
    refuses(disk, state, "has been closed. Make a new one")


def test_a_folder_is_for_one_optimizer(tmp_path):
    with open_disk(tmp_path):
        with pytest.raises(BlockingIOError, match="very process: a DiskOptimizer that"):
            open_disk(tmp_path)
        program = f"""
import jax, numpy as np, optax, shardjax as sj
from shardjax import zero
params, tx = {{"w": np.ones(4, "f")}}, optax.sgd(0.1)
plan = zero.plan_zero(params, tx, sj.make_mesh("1x1"), 1)
try:
    zero.DiskOptimizer(tx, plan, {str(tmp_path)!r})
except OSError as error:
    print(error)
"""
        told = run_python(program).stdout
        assert f"in use by process {os.getpid()}. Give each process" in told


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="optimizer's state needs a folder that it can"):
        open_disk(tmp_path / "file" / "below")
    open_disk(tmp_path / "not" / "there").close()


def test_files_of_a_killed_run_are_removed(tmp_path):
    program = f"""
import numpy as np, optax, time, shardjax as sj
from shardjax import zero
params, tx = {{"w": np.ones(4, "f")}}, optax.adam(0.1)
plan = zero.plan_zero(params, tx, sj.make_mesh("1x1"), 1)
disk = zero.DiskOptimizer(tx, plan, {str(tmp_path)!r})
disk.init_state(params)
disk.flush()
print("ready", flush=True)
time.sleep(100)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [x.stat().st_size for x in tmp_path.glob("*.shardjax-state")] == [32]
    (tmp_path / "mine.txt").write_text("not ours")
    with open_disk(tmp_path) as disk:
        assert [x.stat().st_size for x in tmp_path.glob("*.shardjax-state")] == [0]
        train_on_disk(disk, 1)
    assert (tmp_path / "mine.txt").exists()


def test_reading_ahead_leaves_less_to_wait_for(tmp_path, monkeypatch):
    waited = {}
    plain = os.preadv

    def slow(*args):
        time.sleep(0.05)
        return plain(*args)

    monkeypatch.setattr(os, "preadv", slow)
    for prefetch in (True, False):
        with open_disk(tmp_path, group_bytes=10**9, prefetch=prefetch) as disk:
            state, _ = train_on_disk(disk, 1)
            time.sleep(0.3)  # for what a loop does between steps
            _, infos = train_on_disk(disk, 1, state)
            waited[prefetch] = infos[0]["disk_wait_s"]
    assert waited[True] < 0.8 * waited[False]  # of two groups, one was read ahead


@pytest.mark.parametrize(
    ("tx", "plan_options", "options", "message"),
    [
        (ADAMW, {}, {"group_bytes": 0}, "`group_bytes` must be positive, got 0"),
        (ADAMW, {"offload": "opt_state"}, {}, "needs a plan with offload='none'"),
        (optax.lamb(0.1), {}, {}, "keep the state on the devices"),
    ],
)
def test_bad_options(tmp_path, tx, plan_options, options, message):
    plan = plan_small("1x1", 1, tx, **plan_options)
    with pytest.raises(ValueError, match=message):
        zero.DiskOptimizer(tx, plan, tmp_path / "disk", **options)
    assert not (tmp_path / "disk").exists()


def test_other_states_are_refused(tmp_path):
    params = {"w": np.ones((4, 2), np.float32)}
    plan = zero.plan_zero(params, ADAMW, sj.make_mesh("1x1"), 1)
    with zero.DiskOptimizer(ADAMW, plan, tmp_path) as disk:
        with pytest.raises(ValueError, match="`opt_state` must have the structure"):
            disk.init_state(params, {"a": 1})
        other = ADAMW.init({"w": np.ones((4, 3), np.float32)})
        with pytest.raises(
            ValueError, match=r"must be float32\[4, 2\], got float32\[4, 3"
        ):
            disk.init_state(params, other)

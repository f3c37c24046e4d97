"""Increments: what has changed since the step before, restored with what has not."""

import json
import shutil

import numpy as np
import pytest

from shardjax.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    StepFolder,
    compact,
)
from shardjax.checkpoint.__main__ import main
from shardjax.checkpoint.chain import chain_of
from shardjax.embed import LRU, TTL, MinCount
from tests.checkpoint.test_checkpointer import train
from tests.embed.test_snapshots import storage_of
from tests.embed.test_tiers import Run, batches

STEPS, EVERY, KEYS = 40, 5, 1500
POLICIES = {
    "none": {},
    "count": {"admit": MinCount(2)},
    "evict": {"evict": (TTL(22, every=4), LRU(rows=700, every=6))},
}


def lookups(run, count=KEYS):
    """Rows of all keys, and whether they have one."""
    found = [
        run.collection.lookup_rows(run.state.tables, table, np.arange(count))
        for table in ("user", "item")
    ]
    return [{name: np.asarray(x) for name, x in one.items()} for one in found]


def restored(folder, mesh, storage, step, **more):
    run = Run(mesh, "adam", storage, 5, **more)
    with Checkpointer(folder, collection=run.collection) as checkpointer:
        run.state = checkpointer.restore(run.state, step).state
    return run


def assert_alike(a, b):
    for one, other in zip(lookups(a), lookups(b), strict=True):
        assert one.keys() == other.keys()
        for name, x in one.items():
            np.testing.assert_array_equal(x, other[name], err_msg=name)
    for x, y in zip(a.rows(), b.rows(), strict=True):
        np.testing.assert_array_equal(x, y)
    for table in ("user", "item"):
        keys = [np.sort(x.collection.keys(table)) for x in (a, b)]
        np.testing.assert_array_equal(*keys)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("disk", "evict"), ("RAM", "count"), ("devices", "none"), ("devices", "evict")],
)
def test_a_chain_is_the_state_that_was(kind, policy, tmp_path):
    made = batches(24, keys=KEYS) + batches(STEPS - 24, seed=2, keys=60)
    more = {"item": POLICIES[policy]}
    run = Run("4x2", "adam", storage_of(kind, tmp_path / "a"), 4, **more)
    train(run, made, 4, tmp_path / "run", interval=EVERY, full_every=4, keep=None)
    with StepFolder(tmp_path / "run", write=False) as folder:
        steps = folder.steps()
        bases = [len(chain_of(folder, step)) for step in steps]
        sizes = [
            sum(
                n
                for f, (n, _) in folder.read(s).files.items()
                if f.startswith("tables")
            )
            for s in steps
        ]
        removed = [folder.read(s).details["rows"]["removed"] for s in steps]
    assert steps == list(range(EVERY, STEPS + 1, EVERY))
    # the first ones change more than half of the rows that there are
    assert bases[-3:] in ([1, 2, 3], [4, 1, 2]) and bases[0] == 1
    last_full = max(n for n, length in enumerate(bases) if length == 1)
    increments = [n for n in range(4, len(steps)) if bases[n] > 1]
    assert all(sizes[n] < sizes[last_full] for n in increments)
    assert any(sum(removed[n]) for n in increments) == (policy == "evict")
    step = max(steps[n] for n in increments)
    if step != STEPS:  # the state of then
        run.collection.close()
        run = Run("4x2", "adam", storage_of(kind, tmp_path / "b"), 4, **more)
        train(run, made[:step], 4, tmp_path / "other", interval="none")
    for mesh, where in ("1x1", "devices"), ("2x4", "disk"):
        again = restored(
            tmp_path / "run", mesh, storage_of(where, tmp_path / "c"), step, **more
        )
        assert_alike(run, again)
        again.collection.close()
    run.collection.close()


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """A folder with the steps 5 (all rows), 10 and 15 (increments)."""
    path = tmp_path_factory.mktemp("increments")
    run = Run("1x1", "adam")
    made = batches(9, keys=KEYS) + batches(15, seed=2, keys=60)
    with Checkpointer(path, collection=run.collection, full_every=9) as checkpointer:
        for n, batch in enumerate(made, -8):
            run.train([batch])
            if n > 0 and not n % 5:
                checkpointer.save(n, run.state)
        checkpointer.wait()
        chain = chain_of(checkpointer._folder, 15)
    assert [part.step for part in chain] == [15, 10, 5]
    return path, run


@pytest.fixture
def folder(made_once, tmp_path):
    """A copy of it, and the run after step 15."""
    path, run = made_once
    shutil.copytree(path, tmp_path / "run")
    return tmp_path / "run", run


def test_pruning_leaves_what_a_step_needs(folder):
    path, run = folder
    with StepFolder(path, write=True) as steps:
        assert steps.prune(1) == [] and steps.steps() == [5, 10, 15]
        assert compact(steps, 10) == 2
        assert compact(steps, 10) == 1
        assert steps.prune(1) == [5]
        steps.verify(10)
    assert_alike(run, restored(path, "1x1", None, 15))


def test_compacting_on_the_command_line(folder, capsys):
    path, run = folder
    assert main(["compact", str(path)]) == 0
    assert "step 15: made of 3 steps" in capsys.readouterr().out
    assert main(["compact", str(path), "--step", "5"]) == 0
    assert "step 5: as it was" in capsys.readouterr().out
    assert main(["prune", str(path), "--keep", "1"]) == 0
    assert main(["verify", str(path)]) == 0
    assert "step 15: ok" in capsys.readouterr().out
    assert_alike(run, restored(path, "2x1", None, None))


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_kill_while_a_step_is_replaced_leaves_a_good_one(folder, moment):
    path, run = folder
    shutil.copytree(path / "step_15", path / "before")
    with StepFolder(path, write=True) as steps:
        compact(steps, 15)
    shutil.copytree(path / "step_15", path / ".step_15.again")
    if moment == "before":
        shutil.rmtree(path / "step_15")
        (path / "before").rename(path / "step_15")
    elif moment == "between":
        (path / "step_15").rename(path / ".step_15.removing")
    else:
        shutil.rmtree(path / ".step_15.again")
        (path / "before").rename(path / ".step_15.removing")
    with StepFolder(path, write=True) as steps:
        assert steps.steps() == [5, 10, 15]
        steps.verify(15)
        assert len(chain_of(steps, 15)) == (3 if moment == "before" else 1)
    assert not list(path.glob(".step_*"))
    assert_alike(run, restored(path, "1x1", None, 15))


def test_damage_anywhere_in_a_chain_is_found(folder):
    path, _ = folder
    file = next((path / "step_10" / "tables").glob("*/c/0/0"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(bytes(data))
    again = Run("1x1", "adam")
    with Checkpointer(path, collection=again.collection) as checkpointer:
        with pytest.raises(CorruptCheckpointError, match="step 10 in"):
            checkpointer.restore(again.state, 15)
        with pytest.raises(CorruptCheckpointError, match="step 10 in"):
            checkpointer.restore(again.state)
        found = checkpointer.restore(again.state, on_corrupt="fallback")
        assert found.step == 5


def test_a_missing_step_of_a_chain_is_found(folder):
    path, _ = folder
    shutil.rmtree(path / "step_5")
    again = Run("1x1", "adam")
    with Checkpointer(path, collection=again.collection) as checkpointer:
        for step in (15, None):
            with pytest.raises(CorruptCheckpointError, match="step 5.* is missing"):
                checkpointer.restore(again.state, step)


def test_a_failed_increment_is_made_good_by_the_next(tmp_path, monkeypatch):
    run = Run("1x1", "adam")
    made = batches(9, seed=2, keys=60)
    with Checkpointer(
        tmp_path, collection=run.collection, full_every=9
    ) as checkpointer:
        run.train(batches(9, keys=KEYS))
        checkpointer.save(1, run.state)
        run.train(made[:3])
        commit = checkpointer._folder.commit

        def full(*args):
            raise OSError(28, "No space left on device")

        checkpointer.wait(run.state)
        monkeypatch.setattr(checkpointer._folder, "commit", full)
        checkpointer.save(2, run.state)
        with pytest.raises(OSError, match="No space left"):
            checkpointer.wait()
        monkeypatch.setattr(checkpointer._folder, "commit", commit)
        run.train(made[3:])
        checkpointer.save(3, run.state)
        checkpointer.wait()
        assert checkpointer.inspect(3).needs == (1,)
    assert_alike(run, restored(tmp_path, "1x1", None, 3))


def test_a_run_goes_on_with_increments_unless_its_tables_lie_otherwise(
    folder, tmp_path
):
    path, run = folder
    for mesh, storage, needs in ("4x2", None, (15,)), ("1x1", "RAM", (15,)):
        own = tmp_path / mesh
        shutil.copytree(path, own)
        again = Run(mesh, "adam", storage_of(storage or "devices", None), 3)
        with Checkpointer(own, collection=again.collection, full_every=9) as saving:
            again.state = saving.restore(again.state).state
            again.train(batches(2, seed=5, keys=50))
            saving.save(17, again.state)
            saving.wait()
            assert saving.inspect(17).needs == needs
        assert_alike(again, restored(own, "1x1", None, 17))


def test_messages(tmp_path):
    with pytest.raises(ValueError, match="`full_every` .* at least 1, got 0"):
        Checkpointer(tmp_path, full_every=0)
    with pytest.raises(ValueError, match="`full_every` .* an integer .* got 1.5"):
        Checkpointer(tmp_path, full_every=1.5)  # type: ignore[arg-type]


def test_too_few_rows_in_a_chain_are_noticed(folder):
    path, _ = folder
    manifest = json.loads((path / "step_10" / "manifest.json").read_text())["manifest"]
    with StepFolder(path, write=True) as steps:
        directory = steps.begin(10, again=True)
        for name in ("arrays", "tables"):
            shutil.copytree(path / "step_10" / name, directory / name)
        details = manifest["details"]
        details["rows"]["written"] = [0 for _ in details["rows"]["written"]]
        steps.commit(10, details, needs=[5])
    again = Run("1x1", "adam")
    with Checkpointer(path, collection=again.collection) as checkpointer:
        with pytest.raises(
            CorruptCheckpointError, match="had .* rows by group, and with"
        ):
            checkpointer.restore(again.state, 15)

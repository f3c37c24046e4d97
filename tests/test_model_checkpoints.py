"""Checkpoints of models that look their tables up themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardjax as sj
from shardjax import zero
from shardjax.checkpoint import Checkpointer, StepFolder
from shardjax.embed.in_graph import lookup

ROWS, DIM, BATCH = 13, 3, 16  # rows that are padded on 2 and on 8 devices
TX, ADAGRAD = optax.adam(0.1), optax.adagrad(0.1)


def plans(shape, stage, optimizer, rows=ROWS, dim=DIM):
    rng = np.random.default_rng(0)
    params = {
        "t": rng.normal(size=(rows, dim)).astype(np.float32),
        "w": rng.normal(size=(8, dim)).astype(np.float32),
    }
    mesh = sj.make_mesh(shape)
    tables = sj.embed.plan_tables(params, ["t"], optimizer, mesh=mesh)
    dense = tables.split(params)
    plan = zero.plan_zero(dense, TX, mesh, stage, axes=tables.axes, min_bytes=0)
    return tables, plan, sj.init_model_state(params, TX, tables, plan)


def make_training(shape, stage, optimizer=ADAGRAD):
    tables, plan, state = plans(shape, stage, optimizer)

    def loss(params, batch):
        out = lookup(params["t"], batch["ids"]) @ params["w"].T
        return jnp.sum((jnp.sum(out, -1) - batch["y"]) ** 2), jnp.float32(len(out))

    return sj.make_model_step(loss, TX, tables, plan), state, tables


def make_batch(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, BATCH, dtype=np.int32)
    return {"ids": ids, "y": rng.normal(size=BATCH).astype(np.float32)}


def trained(tables, state):
    """What a state has learned, wherever it lies: parameters, and rows with their state."""
    rows = {
        path: (found.rows, found.row_state, state.tables[path].shared)
        for path, found in tables.export(state.tables).items()
    }
    dense = state.step, state.params, state.opt_state, state.loss_scale
    return jax.device_get((dense, rows))


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def take(step, state, seeds):
    losses = []
    for seed in seeds:
        state, info = step(state, make_batch(seed))
        losses.append(float(info["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with step 1 of 3, saved on 8x1, and what the run that goes on comes to."""
    folder = tmp_path_factory.mktemp("run")
    step, state, tables = make_training("8x1", 2)
    with Checkpointer(folder) as checkpointer:
        state, _ = take(step, state, [0])
        at_save = trained(tables, state)
        checkpointer.save(1, state)
        state, losses = take(step, state, [1, 0])
    return folder, at_save, losses, trained(tables, state)


def test_a_resumed_run_is_the_run_that_went_on(saved):
    folder, at_save, losses, end = saved
    step, fresh, tables = make_training("8x1", 2)
    with Checkpointer(folder) as checkpointer:
        found = checkpointer.restore(fresh)
        assert_equal(trained(tables, found.state), at_save)
        state, again = take(step, found.state, [1, 0])
    assert again == losses
    assert_equal(trained(tables, state), end)


def test_restored_on_other_meshes_and_stages(saved, tmp_path):
    folder, at_save, losses, _ = saved
    for shape, stage in (("2x4", 3), ("1x1", 0)):
        step, fresh, tables = make_training(shape, stage)
        with Checkpointer(folder) as checkpointer:
            state = checkpointer.restore(fresh).state
        assert_equal(trained(tables, state), at_save)
        like = jax.eval_shape(lambda state: state, fresh)
        assert jax.tree.structure(state) == jax.tree.structure(like)
        folder = tmp_path / shape
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state)
            state, again = take(step, state, [1, 0])
        np.testing.assert_allclose(again, losses, rtol=1e-4)


def test_a_save_that_ends_midway_leaves_the_one_before(saved, tmp_path, monkeypatch):
    folder, at_save, _, _ = saved
    _, fresh, tables = make_training("8x1", 2)
    with Checkpointer(folder) as checkpointer:
        state = checkpointer.restore(fresh).state

    def commit(*_):  # all is written but the manifest
        raise OSError("no room")

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(StepFolder, "commit", commit)
        checkpointer.save(2, state)
        with pytest.raises(OSError, match="no room"):
            checkpointer.close()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1]
        assert_equal(trained(tables, checkpointer.restore(state).state), at_save)


@pytest.mark.parametrize(
    ("rows", "dim", "optimizer", "message"),
    [
        # as many rows as saved with their padding
        (
            16,
            3,
            ADAGRAD,
            r"t/rows: .* float32\[13, 3\] in the .* float32\[16, 3\] in the",
        ),
        (
            13,
            4,
            ADAGRAD,
            r"t/rows: .* float32\[13, 3\] in the .* float32\[13, 4\] in the",
        ),
        (
            13,
            3,
            optax.sgd(0.1, 0.9),
            r"row_state/0/trace: float32\[13, 3\] in the target",
        ),
    ],
)
def test_another_table_is_refused(tmp_path, rows, dim, optimizer, message):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, plans("8x1", 0, ADAGRAD)[2])
        checkpointer.wait()
        with pytest.raises(ValueError, match=message):
            checkpointer.restore(plans("1x1", 0, optimizer, rows, dim)[2])


def test_a_new_row_optimizer_starts_anew_where_the_old_one_is_ignored(tmp_path):
    state = plans("8x1", 0, ADAGRAD)[2]
    fresh = plans("1x1", 0, optax.adam(0.1))[2]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        ignored = ["tables/t/row_state/*", "tables/t/shared/*"]
        found = checkpointer.restore(fresh, ignore=ignored).state.tables["t"]
    np.testing.assert_array_equal(found.rows, state.tables["t"].rows[:ROWS])
    assert found.names == fresh.tables["t"].names
    assert [int(x.any()) for x in found.row_state] == [0, 0]

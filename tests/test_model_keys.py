"""Tables whose rows are given to 64-bit keys inside of the step."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardjax as sj
from shardjax import zero
from shardjax.checkpoint import Checkpointer
from shardjax.embed import DeviceVocabulary, keys_for, table_placing
from shardjax.embed.in_graph import lookup
from tests.cluster import run_cluster
from tests.embed.reference import wide_keys

CAPACITY, DIM, BATCH = 64, 3, 16
TX, ADAGRAD = optax.sgd(0.1), optax.adagrad(0.1)
VOCABULARY = DeviceVocabulary("item", sj.embed.uniform(0.5), seed=3)
KEYS = wide_keys(24)


def make_batch(seed, keys=KEYS):
    rng = np.random.default_rng(seed)
    chosen = keys[np.minimum(rng.zipf(1.3, (BATCH, 2)), len(keys)) - 1]
    valid = rng.random((BATCH, 2)) < 0.8
    return chosen, valid, rng.normal(size=BATCH).astype(np.float32)


def with_keys(chosen, valid, y):
    return {"ids": keys_for("t", chosen, valid), "y": y}


def predict(params, batch):
    rows = lookup(params["t"], batch["ids"], padding_id=-1)
    return jnp.sum(rows.sum(1) * params["w"], -1)


def loss(params, batch):
    out = predict(params, batch)
    return jnp.sum((out - batch["y"]) ** 2), jnp.float32(len(out))


def make_training(shape, rows=CAPACITY, *, t=None, microbatches=1):
    params = {"t": np.zeros((rows, DIM), np.float32) if t is None else t}
    params["w"] = np.ones((1, DIM), np.float32)
    mesh = sj.make_mesh(shape)
    known = {"t": VOCABULARY} if t is None else None
    tables = sj.embed.plan_tables(params, ["t"], ADAGRAD, mesh=mesh, vocabularies=known)
    plan = zero.plan_zero(tables.split(params), TX, mesh, 0, axes=tables.axes)
    state = sj.init_model_state(params, TX, tables, plan)
    step = sj.make_model_step(loss, TX, tables, plan, microbatches=microbatches)
    return step, state, tables, plan


def first_rows(keys):
    """Those of a collection, which finds them on the host: of seed, name and key."""
    table = sj.embed.TableSpec("item", dim=DIM, initializer=VOCABULARY.initializer)
    features = {"item": sj.embed.FeatureSpec(table)}
    mesh, seed = sj.make_mesh("1x1"), VOCABULARY.seed
    collection = sj.embed.EmbeddingCollection(features, mesh=mesh, seed=seed)
    plan = collection.plan({"item": keys}, batch=len(keys), train=True)
    state = collection.apply_fills(collection.init(), plan)
    return np.asarray(collection.lookup_rows(state, "item", keys)["rows"])


def slots_of(state):
    hi, lo, used = jax.device_get(sj.embed.device_table.export(state.tables["t"].keys))
    keys, slots = sj.embed.join_keys(hi, lo), np.flatnonzero(used)
    return dict(zip(keys[slots].tolist(), slots.tolist(), strict=True))


@pytest.mark.parametrize("shape", ["1x1", "8x1", "1x8", "4x2", "2x4"])
def test_keys_train_as_the_rows_that_they_get(shape):
    microbatches = 2 if shape in ("1x1", "4x2") else 1
    step, state, tables, _ = make_training(shape, microbatches=microbatches)
    batches, losses = [make_batch(seed) for seed in (0, 1, 2)], []
    for batch in batches:
        state, info = step(state, with_keys(*batch))
        losses.append(float(info["loss"]))
        assert int(info["bad_ids"]) == 0
    slots = slots_of(state)
    seen = {int(k) for chosen, valid, _ in batches for k in chosen[valid]}
    assert set(slots) == seen
    t = np.zeros((CAPACITY, DIM), np.float32)
    keys = np.array(list(slots), np.uint64)
    t[list(slots.values())] = first_rows(keys)
    step, fixed, plain, _ = make_training(shape, t=t, microbatches=microbatches)
    again = []
    for chosen, valid, y in batches:
        ids = np.vectorize(lambda k: slots.get(int(k), -1), otypes=[np.int32])(chosen)
        ids = np.where(valid, ids, -1).astype(np.int32)
        fixed, info = step(fixed, {"ids": ids, "y": y})
        again.append(float(info["loss"]))
    assert losses == again
    found, wanted = tables.export(state.tables)["t"], plain.export(fixed.tables)["t"]
    rows = [slots[int(key)] for key in found.keys]
    np.testing.assert_array_equal(found.rows, wanted.rows[rows])
    np.testing.assert_array_equal(found.row_state[0], wanted.row_state[0][rows])


def test_a_full_table_is_counted_and_makes_the_loss_nan():
    step, state, _, _ = make_training("2x1", 8)
    keys = KEYS.repeat(2).reshape(24, 2)[:BATCH]
    valid = np.ones((BATCH, 2), bool)
    y = np.zeros(BATCH, np.float32)
    state, info = step(state, with_keys(keys, valid, y))
    there = len(slots_of(state))
    assert there <= 8 and int(info["bad_ids"]) == 2 * (BATCH - there)
    assert np.isnan(info["loss"])


def test_an_evaluation_inserts_nothing_and_counts_what_is_unseen():
    step, state, tables, plan = make_training("8x1")
    evaluate = sj.make_model_eval(predict, tables, plan)
    chosen, _, y = make_batch(0)
    batch = with_keys(chosen, np.ones((BATCH, 2), bool), y)
    out, info = evaluate(state, batch)
    assert int(info["unseen"]) == chosen.size and int(info["bad_ids"]) == 0
    np.testing.assert_array_equal(out, 0)
    state, _ = step(state, batch)
    out, info = evaluate(state, batch)
    assert int(info["unseen"]) == 0
    found = tables.export(state.tables)["t"]
    rows = dict(zip(found.keys.tolist(), found.rows, strict=True))
    sums = [sum(rows[int(k)] for k in bag) @ state.params["w"][0] for bag in chosen]
    np.testing.assert_allclose(out, sums, rtol=1e-5, atol=1e-6)


def test_keys_are_restored_with_their_rows(tmp_path):
    step, state, tables, _ = make_training("8x1")
    state, _ = step(state, with_keys(*make_batch(0)))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        state, info = step(state, with_keys(*make_batch(1)))
        fresh = make_training("8x1")[1]
        found = checkpointer.restore(fresh).state
        found, again = step(found, with_keys(*make_batch(1)))
        assert float(again["loss"]) == float(info["loss"])
        jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
        for x, y in zip(
            jax.tree.leaves(vars(tables.export(found.tables)["t"])),
            jax.tree.leaves(vars(tables.export(state.tables)["t"])),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y)


def by_key(tables, state):
    """Keys in ascending order, their rows, and the state of those."""
    found = tables.export(state.tables)["t"]
    found = found.take(np.argsort(found.keys))
    return found.keys, found.rows, *found.row_state


def assert_same_bits(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with step 1 of 3, saved on 8x1; its rows; what the run goes on to."""
    folder = tmp_path_factory.mktemp("run")
    step, state, tables, _ = make_training("8x1")
    state, _ = step(state, with_keys(*make_batch(0)))
    # zeros of either sign are of one value, and not of the same bits
    table = state.tables["t"]
    signed = jnp.where(jnp.arange(DIM) == 1, -0.0, table.rows)
    state = state.replace(tables={"t": dataclasses.replace(table, rows=signed)})
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
        at_save = by_key(tables, state)
        state, losses = go_on(step, state)
    return folder, at_save, losses, by_key(tables, state)


def go_on(step, state):
    losses = []
    for seed in (1, 2):  # with keys that are new
        state, info = step(state, with_keys(*make_batch(seed)))
        losses.append(float(info["loss"]))
        assert int(info["bad_ids"]) == 0
    return state, losses


def test_keys_are_restored_on_other_devices(saved, tmp_path):
    folder, at_save, losses, end = saved
    assert len(at_save[0]) < len(end[0])
    for shape, rows in (("2x4", 72), ("1x1", 50), ("8x1", CAPACITY)):
        step, fresh, tables, _ = make_training(shape, rows)
        with Checkpointer(folder) as checkpointer:
            state = checkpointer.restore(fresh).state
        assert_same_bits(by_key(tables, state), at_save)
        assert jax.tree.structure(state) == jax.tree.structure(fresh)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
            assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
        folder = tmp_path / shape
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
        if shape != "8x1":  # the one that has gone on already
            state, again = go_on(step, state)
            np.testing.assert_allclose(again, losses, rtol=1e-4)
            keys, *values = by_key(tables, state)
            np.testing.assert_array_equal(keys, end[0])
            for x, y in zip(values, end[1:], strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_keys_move_to_other_devices_a_few_at_a_time(saved, monkeypatch):
    folder, at_save, *_ = saved
    _, fresh, tables, _ = make_training("8x1")
    with Checkpointer(folder) as checkpointer:
        state = checkpointer.restore(fresh).state
    monkeypatch.setattr(table_placing, "_AT_ONCE", 1)
    params = {"t": np.zeros((20, DIM), np.float32)}
    known = {"t": VOCABULARY}
    small = sj.embed.plan_tables(params, ["t"], ADAGRAD, vocabularies=known)
    moved = small.place(state.tables)
    assert_same_bits(by_key(small, state.replace(tables=moved)), at_save)
    moved = tables.place(moved)
    assert_same_bits(by_key(tables, state.replace(tables=moved)), at_save)
    assert int(jnp.sum(moved["t"].keys.count)) == len(at_save[0])
    other = sj.embed.plan_tables(params, ["t"], ADAGRAD)
    with pytest.raises(ValueError, match="no table 't' of 20 rows of dim 3 without"):
        other.place(moved)
    with pytest.raises(ValueError, match="no table 't' of 20 rows of dim 3 with keys"):
        small.place(other.init(params))


def test_keys_without_room_are_refused_and_told_how_many_rows_do(saved):
    folder, at_save, *_ = saved
    with Checkpointer(folder) as checkpointer:
        with pytest.raises(
            ValueError,
            match=rf"t' has {len(at_save[0])} rows with keys, and \d+ of them find no"
            r" room: its capacity is 8 rows, 2 on each of 4 devices.*Plan the table with",
        ) as error:
            checkpointer.restore(make_training("4x1", 8)[1])
        rows = int(str(error.value).split()[-2])
        _, fresh, tables, _ = make_training("4x1", rows)
        state = checkpointer.restore(fresh).state
        assert_same_bits(by_key(tables, state), at_save)
        found = checkpointer.restore(fresh, ignore=["tables/t/row_state/*"]).state
    keys, values, sums = by_key(tables, found)
    assert_same_bits((keys, values), at_save[:2])
    np.testing.assert_array_equal(sums, np.float32(0.1))  # as Adagrad begins


PROCESSES = """
import json
from tests import test_model_keys as tests
start()
print(json.dumps(tests.summary()))
"""


def summary():
    """What three steps come to on 8 devices: losses, keys and their rows; by other
    devices too."""
    step, state, tables, _ = make_training("8x1")
    losses = []
    for seed in (0, 1, 2):
        state, info = step(state, with_keys(*make_batch(seed)))
        losses.append(float(info["loss"]))
    found, elsewhere = by_key(tables, state), make_training("2x4", 72)[2]
    moved = state.replace(tables=elsewhere.place(state.tables))
    assert_same_bits(by_key(elsewhere, moved), found)
    return [losses, *(x.tolist() for x in found)]


@pytest.mark.multiprocess
def test_processes_train_as_one():
    first, second = run_cluster(PROCESSES, 2, devices=4, limit=200, whole=True)
    assert first.last == second.last
    losses, keys, *rows = json.loads(first.last)
    wanted_losses, wanted_keys, *wanted_rows = summary()
    assert keys == wanted_keys
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    np.testing.assert_allclose(rows, wanted_rows, rtol=1e-4, atol=1e-6)


def test_misuse_is_refused():
    params = {"t": np.ones((12, DIM), np.float32)}
    mesh = sj.make_mesh("8x1")
    with pytest.raises(
        ValueError, match=r"multiple of 8 rows.*\[12, 3\].*Give it 16 rows"
    ):
        sj.embed.plan_tables(
            params, ["t"], ADAGRAD, mesh=mesh, vocabularies={"t": VOCABULARY}
        )
    with pytest.raises(ValueError, match=r"tables among \['t'\], got those of \['x'\]"):
        sj.embed.plan_tables(params, ["t"], ADAGRAD, vocabularies={"x": VOCABULARY})
    with pytest.raises(TypeError, match="`initializer` of the vocabulary 'a' must be"):
        DeviceVocabulary("a", 0.1)
    step, state, _, _ = make_training("1x1", t=np.ones((8, DIM), np.float32))
    with pytest.raises(
        ValueError, match="keys of 't', and the tables with a vocabulary"
    ):
        step(state, with_keys(*make_batch(0)))


def test_evaluations_that_nobody_reads_go_on():
    """They stopped for good on 8 simulated devices."""
    _, state, tables, plan = make_training("8x1")
    evaluate = sj.make_model_eval(predict, tables, plan)
    given = with_keys(*make_batch(0))
    for _ in range(200):
        outputs, info = evaluate(state, given)
    assert outputs.shape == given["y"].shape and int(info["bad_ids"]) == 0

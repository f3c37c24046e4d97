"""Exported models: their scores are the trainer's."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardjax import models, train
from shardjax.data import Batch
from shardjax.embed import EmbeddingCollection, FeatureSpec, Jagged, Storage, TableSpec
from shardjax.export import export_model, load_model
from shardjax.mesh import make_mesh
from shardjax.network import Network, from_nnx
from shardjax.state import init_state, stack_metrics
from tests.export.small import SGD, bag, exported, small

DIM, N_DENSE, KEYS = 4, 3, 700


def features_of(dim):
    """Features of all kinds that are pooled, of three tables."""
    user, item = TableSpec("user", dim, SGD), TableSpec("item", dim, SGD)
    site = TableSpec("site", dim, SGD, vocabulary=50, placement="data_parallel")
    return {
        "user": FeatureSpec(user),
        "item": FeatureSpec(item),
        "mean": FeatureSpec(item, combiner="mean"),
        "sqrtn": FeatureSpec(item, combiner="sqrtn", padding_id=-1),
        "sum": FeatureSpec(site, on_bad_id="zero"),
        "drop": FeatureSpec(site, combiner="mean", on_bad_id="drop"),
    }


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    fixed = rng.integers(0, KEYS + 300, (2, size))
    jagged = {
        "mean": bag(rng, size, KEYS + 300, weighted=True),
        "sqrtn": bag(rng, size, KEYS + 300, weighted=True),
        "sum": bag(rng, size, 60),
        "drop": bag(rng, size, 60),
    }
    jagged["sqrtn"].values[::4] = 2**64 - 1
    return Batch(
        rng.integers(0, 2, size),
        rng.normal(size=(size, N_DENSE)),
        fixed,
        ("user", "item"),
        jagged,
    )


def keyed(batch):
    return dict(zip(batch.fixed_names, batch.fixed, strict=True)) | batch.jagged


def predictions(network, collection, state, batch):
    """What an evaluation step predicts."""
    step = train.make_eval_step(network, collection)
    prepared = train.prepare(collection, batch, train=False)
    metrics = stack_metrics({}, collection.mesh)
    _, found = step(state, metrics, prepared)
    return np.asarray(found)[: batch.size], prepared.counters


@functools.cache
def network_of(name):
    sizes = {"features": tuple(features_of(DIM)), "n_dense": N_DENSE}
    if name == "deepfm":
        sizes |= {"dim": DIM - 1, "hidden": (8,)}
        return from_nnx(models.DeepFM(**sizes, rngs=nnx.Rngs(0)))
    sizes |= {"dim": DIM, "bottom": (8,), "top": (8,)}
    return from_nnx(models.DLRM(**sizes, rngs=nnx.Rngs(0)))


def fill(collection, state, seed=0):
    """Rows of all tables."""
    rng = np.random.default_rng(seed)
    tables = state.tables
    for name, count in (("user", KEYS), ("item", KEYS), ("site", 40)):
        values = rng.normal(size=(count, DIM))
        tables = collection.load_rows(tables, name, np.arange(count), values)
    return state.replace(tables=tables)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ("1x1", "dlrm"),
        ("8x1", "deepfm"),
        ("1x8", "dlrm"),
        ("4x2", "dlrm"),
        ("2x4", "deepfm"),
    ],
)
def test_scores_are_those_of_the_trainer(mesh, name, tmp_path):
    collection = EmbeddingCollection(
        features_of(DIM),
        mesh=make_mesh(mesh),
        initial_rows=64,
        storage=Storage(device_rows=400, host_bytes="1KB", disk=tmp_path / "tiers"),
    )
    network = network_of(name)
    state = fill(collection, init_state(network, optax.sgd(0.1), collection))
    if mesh == "1x1":
        step = train.make_train_step(network, optax.sgd(0.1), collection)
        state, _ = step(
            state, train.prepare(collection, batch_of(37, seed=1), train=True)
        )
    stats = collection.stats()["group0"]
    assert stats["device_rows"] and stats["host_rows"] and stats["disk_rows"]
    batch = batch_of(37)
    expected, counters = predictions(network, collection, state, batch)
    assert counters["unseen"] > 20 and counters["bad_ids"] > 10
    counts = export_model(
        network, collection, state, tmp_path / "model", n_dense=N_DENSE
    )
    assert counts == {name: len(collection.keys(name)) for name in counts}
    assert list(counts) == ["user", "item", "site"] and counts["user"] >= KEYS
    model = load_model(tmp_path / "model")
    assert model.step == (mesh == "1x1")
    found = model(batch.dense, keyed(batch))
    assert found.dtype == np.float32 and found.shape == (37,)
    # the network is compiled for batches of other sizes: its last bits may differ
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert np.ptp(expected) > 0.1
    collection.close()


def test_vectors_have_the_bits_of_the_trainers(tmp_path):
    def apply(params, state, dense, embeddings, *, train):
        vectors = jnp.concatenate([embeddings[name] for name in features_of(DIM)], 1)
        return vectors[:, params["column"]], state

    collection = EmbeddingCollection(
        features_of(DIM), mesh=make_mesh("4x2"), initial_rows=64
    )
    network = Network(apply, {"column": jnp.int32(0)}, {})
    state = fill(collection, init_state(network, optax.set_to_zero(), collection))
    batch = batch_of(37)
    model = exported(tmp_path / "a", collection, network, state, N_DENSE)
    found = model.embed(keyed(batch), batch.size)
    step = train.make_eval_step(network, collection, predict=lambda x: x)
    prepared = train.prepare(collection, batch, train=False)
    for column, own in enumerate(np.concatenate(list(found.values()), 1).T):
        state = state.replace(params={"column": jnp.int32(column)})
        metrics = stack_metrics({}, collection.mesh)
        _, expected = step(state, metrics, prepared)
        np.testing.assert_array_equal(own, np.asarray(expected)[: batch.size])


def assert_alike(folder, made, feature):
    """The model gives what the trainer predicts."""
    collection, network, state = made
    size = len(feature.lengths)
    dense = np.linspace(-1, 1, size, dtype=np.float32)[:, None]
    batch = Batch(np.zeros(size), dense, np.zeros((0, size), int), (), {"f": feature})
    expected, _ = predictions(network, collection, state, batch)
    found = exported(folder, collection, network, state)(dense, {"f": feature})
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert np.ptp(expected) > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 4},
        {"max_length": 2, "on_long": "first", "padding_id": 99},
        {"max_length": 2, "on_long": "last", "vocabulary": 40, "on_bad_id": "drop"},
    ],
)
def test_sequences(options, tmp_path):
    def apply(params, state, dense, embeddings, *, train):
        values, mask = embeddings["f"]
        place = jnp.arange(values.shape[1], dtype=jnp.float32)[None]
        logits = (values.sum(2) * jnp.cos(place)).sum(1) + (mask * place).sum(1)
        return logits + dense[:, 0], state

    lengths = np.array([0, 3, 1, 4, 0, 3, 4])
    keys = np.array([99, 1, 2, 41, 99, 3, 7, 8, 50, 4, 99, 5, 99, 6, 3])
    made = small("none", Network(apply, {}, {}), **options)
    assert_alike(tmp_path / "a", made, Jagged(keys, lengths))


def test_rows_of_fewer_bits(tmp_path):
    made = small("mean", dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    assert_alike(tmp_path / "a", made, bag(rng, 30, 50, weighted=True))


def test_state_of_the_network_and_random_keys_go_with_it(tmp_path):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, dense, embeddings):
            return self.drop(self.norm(embeddings["f"])).sum(1) + dense[:, 0]

    module = Net(nnx.Rngs(0))
    module.norm.mean[...] = jnp.array([1.0, -2.0])
    made = small(network=from_nnx(module))
    assert any(
        jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        for x in jax.tree.leaves(made[2].model_state)
    )
    feature = bag(np.random.default_rng(0), 12, 50)
    assert_alike(tmp_path / "a", made, feature)
    about = json.loads((tmp_path / "a" / "model.json").read_text())
    assert "model_state/norm/mean/value" in about["arrays"], about["arrays"]


def test_a_model_without_rows(tmp_path):
    collection, network, state = small()
    model = exported(
        tmp_path / "a",
        collection,
        network,
        state,
        filter=lambda table, rows: np.zeros(len(rows.keys), bool),
        predict=lambda logits: 2 * logits,
        platforms=["cpu"],
    )
    assert len(model.tables["item"]) == 0
    assert model([[0.5], [1]], {"f": [1, 2]}).tolist() == [1, 2]
    about = json.loads((tmp_path / "a" / "model.json").read_text())
    assert about["platforms"] == ["cpu"]


@pytest.mark.parametrize(
    "model", [models.LogisticRegression, models.WideDeep, models.DCN]
)
def test_every_model_takes_batches_of_any_size(model, tmp_path):
    item = TableSpec("item", model.row_dim(2), SGD)
    collection = EmbeddingCollection({"f": FeatureSpec(item)}, mesh=make_mesh("1x1"))
    sizes = {"features": ("f",), "n_dense": 2, "dim": 2}
    network = from_nnx(model(**sizes, rngs=nnx.Rngs(1)))
    state = init_state(network, SGD, collection)
    model = exported(tmp_path / "a", collection, network, state, n_dense=2)
    dense = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    rows = {"f": jnp.zeros((3, item.dim))}  # no key has one
    logits, _ = network.apply(
        network.params, network.state, jnp.asarray(dense), rows, train=False
    )
    found = model(dense, {"f": np.arange(3)})
    np.testing.assert_allclose(found, jax.nn.sigmoid(logits), rtol=0, atol=1e-6)


def counts_by_len(params, state, dense, embeddings, *, train):
    return jnp.zeros(len(dense)), state


def compares(params, state, dense, embeddings, *, train):
    return dense[:, 0] if dense.shape[0] > 3 else dense[:, 0] + 1, state


def wide(params, state, dense, embeddings, *, train):
    return embeddings["f"], state


def fails(params, state, dense, embeddings, *, train):
    return dense[:, 0] + "a", state


def on_cpus(params, state, dense, embeddings, *, train):
    return dense[:, 0] + jax.lax.linalg.schur(jnp.eye(2))[0].sum(), state


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"apply": counts_by_len}, ValueError, r"batches of any size .* x\.shape in"),
        ({"apply": compares}, ValueError, "batches of any size .* 'b' > '3'"),
        ({"apply": wide}, ValueError, r"must return logits of shape \[batch\]"),
        ({"apply": fails}, TypeError, "unsupported operand|cannot be|not a valid"),
        ({"apply": on_cpus}, ValueError, "cannot be compiled for all `platforms`"),
        (
            {"n_dense": 1.0},
            TypeError,
            "`n_dense` of a model must be an integer, got 1.0",
        ),
        ({"n_dense": -1}, ValueError, "`n_dense` of a model must not be negative"),
        ({"platforms": "cpu"}, TypeError, "a sequence of names such as .* got 'cpu'"),
        ({"state": ()}, TypeError, "`state` must be the TrainState .* got a tuple"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(options, error, message, tmp_path):
    collection, network, state = small()
    network = Network(options.pop("apply", network.apply), {}, {})
    options = {"n_dense": 1, "state": state} | options
    with pytest.raises(error, match=message):
        export_model(
            network, collection, options.pop("state"), tmp_path / "a", **options
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_kept(tmp_path):
    (tmp_path / "mine").write_text("x")
    collection, network, state = small()
    with pytest.raises(FileExistsError, match="has files in it"):
        export_model(network, collection, state, tmp_path, n_dense=1)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]

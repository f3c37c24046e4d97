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
from shardjax.export import Bags, export_model, load_model
from shardjax.mesh import make_mesh
from shardjax.network import Network, from_nnx
from shardjax.state import init_state, stack_metrics
from tests.helpers import run_python

DIM, N_DENSE, KEYS = 4, 3, 700
SGD = optax.sgd(0.1)


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


def bag(rng, batch, keys, weighted=False):
    """Keys of which some are unseen, in bags of which some are empty."""
    lengths = rng.permutation(np.resize([2, 0, 3, 1, 13], batch))
    values = rng.integers(0, keys, int(lengths.sum()))
    if not weighted:
        return Jagged(values, lengths)
    weights = rng.normal(size=len(values))
    weights[::5] = 0
    weights[: lengths[0]] = 0
    return Jagged(values, lengths, weights)


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


def add(params, state, dense, embeddings, *, train):
    return embeddings["f"].sum(1) + dense.sum(1), state


def small(combiner="sum", network=None, **table):
    """A collection with one feature, and a network that adds up its vectors."""
    options = {k: table.pop(k) for k in ("max_length", "on_long") if k in table}
    options |= {k: table.pop(k) for k in ("padding_id", "on_bad_id") if k in table}
    item = TableSpec("item", 2, SGD, **table)
    spec = FeatureSpec(item, combiner=combiner, **options)
    collection = EmbeddingCollection(
        {"f": spec}, mesh=make_mesh("1x1"), initial_rows=64
    )
    network = network or Network(add, {}, {})
    state = init_state(network, SGD, collection)
    tables = collection.load_rows(
        state.tables,
        "item",
        np.arange(40),
        np.random.default_rng(0).normal(size=(40, 2)),
    )
    return collection, network, state.replace(tables=tables)


def exported(folder, collection, network, state, n_dense=1, **options):
    export_model(network, collection, state, folder, n_dense=n_dense, **options)
    return load_model(folder)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that adds up vectors and dense features, and its folder."""
    path = tmp_path_factory.mktemp("model") / "m"
    collection, network, state = small("mean", vocabulary=45, padding_id=-1)
    counts = export_model(network, collection, state, path, n_dense=1)
    assert counts == {"item": 40}
    return path


def test_it_is_loaded_where_shardjax_is_not(folder):
    program = """
import sys
folder = sys.argv[1]
sys.path.insert(0, folder)
sys.modules["shardjax"] = None  # an import of it is an error
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np
from serving import Bags, load_model
before = set(sys.modules)
model = load_model(folder)
assert (model.features, model.n_dense, model.step) == (("f",), 1, 0)
for size in (1, 3, 9):
    keys = Bags(np.arange(2 * size), np.full(size, 2), np.ones(2 * size))
    print(*model(np.zeros((size, 1)), {"f": keys}))
heavy = {"flax", "optax", "orbax", "tensorstore", "numba", "pyarrow"}
assert not heavy & {name.split(".")[0] for name in sys.modules}
"""
    lines = run_python(program, str(folder)).stdout.splitlines()
    model = load_model(folder)
    for line, size in zip(lines, (1, 3, 9), strict=True):
        keys = Bags(np.arange(2 * size), np.full(size, 2))
        found = model(np.zeros((size, 1)), {"f": keys})
        np.testing.assert_allclose(
            [float(x) for x in line.split()], found, rtol=0, atol=1e-6
        )


def test_rows_are_looked_up_by_key(folder):
    model = load_model(folder)
    rows = model.tables["item"]
    assert (len(rows), rows.name, rows.dim, rows.dtype) == (40, "item", 2, np.float32)
    found, known = rows.lookup([7, 44, 7, -1, 0])
    assert known.tolist() == [True, False, True, False, True]
    expected = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    expected = np.where(known[:, None], expected[[7, 0, 7, 0, 0]], 0)
    np.testing.assert_array_equal(found, expected)
    assert rows.lookup(np.zeros(0, int))[0].shape == (0, 2)


def test_a_batch_of_nothing_and_features_that_nobody_reads(folder):
    model = load_model(folder)
    nothing = model(np.zeros((0, 1)), {"f": np.zeros(0, int)})
    assert nothing.shape == (0,) and nothing.dtype == np.float32
    scores = model([[0.5]], {"f": [44], "g": "unread"})  # without a row: zeros
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-0.5)), rtol=1e-6)


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


def bags(values=(1, 2, 3), lengths=(3, 0), weights=None):
    return {"f": Bags(np.array(values), np.array(lengths), weights)}


@pytest.mark.parametrize(
    ("dense", "features", "error", "message"),
    [
        (2, {"g": [1, 2]}, ValueError, r"lacks the features \['f'\].* has \['g'\]"),
        (2, {"f": [1]}, ValueError, r"one key per example, shape \(2,\), got \(1,\)"),
        (2, {"f": [[1, 2]]}, ValueError, r"'f' must have one dim, got shape \(1, 2\)"),
        (
            2,
            {"f": [0.5, 1]},
            TypeError,
            "'f' must be integers, got dtype float64. Hash",
        ),
        (2, {"f": ["a", "b"]}, TypeError, "'f' must be integers, got dtype <U1"),
        (2, {"f": [44, 45]}, ValueError, r"'f' has the id 45, .*vocabulary \[0, 45\)"),
        (2, bags([1.5], [1, 0]), TypeError, "'f' must be integers, got dtype float64"),
        (2, bags([[1]], [1, 0]), ValueError, r"must have one dim, got shape \(1, 1\)"),
        (2, bags(lengths=[3, 0.0]), TypeError, "`lengths` .* must be integers, got"),
        (2, bags(lengths=[3]), ValueError, r"must have 2 `lengths`.* shape \(1,\)"),
        (2, bags(lengths=[4, -1]), ValueError, "negative, got -1 for example 1"),
        (2, bags(lengths=[1, 1]), ValueError, "add up to the number .* got 2 and 3"),
        (
            2,
            bags(weights=[1.0]),
            ValueError,
            r"one entry per value, .*\(1,\) and \(3,\)",
        ),
        (
            2,
            bags(weights=["a"] * 3),
            TypeError,
            "`weights` of feature 'f' must be real",
        ),
        ([1.0, 2.0], bags(), ValueError, r"`dense` .* \[batch, 1\], got \(2,\)"),
        ([[1, 2]] * 2, bags(), ValueError, r"`dense` .* \[batch, 1\], got \(2, 2\)"),
        ([["a"]] * 2, bags(), TypeError, "`dense` must be real numbers, got dtype <U1"),
    ],
)
def test_batches_of_another_kind_are_errors(folder, dense, features, error, message):
    dense = np.zeros((dense, 1)) if isinstance(dense, int) else dense
    with pytest.raises(error, match=message):
        load_model(folder)(dense, features)


@pytest.mark.parametrize(
    ("options", "bag", "message"),
    [
        (
            {"max_length": 2},
            bags(),
            "'f' has 3 keys for example 0 and its `max_length`",
        ),
        ({}, bags(weights=[1.0] * 3), "combiner 'none' and cannot have weights"),
    ],
)
def test_sequences_of_another_kind_are_errors(options, bag, message, tmp_path):
    def apply(params, state, dense, embeddings, *, train):
        return embeddings["f"].values.sum((1, 2)), state

    made = small("none", Network(apply, {}, {}), **options)
    with pytest.raises(ValueError, match=message):
        exported(tmp_path / "a", *made)(np.zeros((2, 1)), bag)


def test_what_is_no_model_cannot_be_loaded(folder, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="there is no model in .* no model.json"
    ):
        load_model(tmp_path)
    about = json.loads((folder / "model.json").read_text()) | {"format": 2}
    (tmp_path / "model.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="has format 2, and this file reads format 1"):
        load_model(tmp_path)


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


def test_a_folder_with_files_is_kept(folder):
    before = sorted(folder.rglob("*"))
    collection, network, state = small()
    with pytest.raises(FileExistsError, match="has files in it"):
        export_model(network, collection, state, folder, n_dense=1)
    assert sorted(folder.rglob("*")) == before

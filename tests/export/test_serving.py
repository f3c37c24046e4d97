"""Scoring with an exported model: where it runs, what it takes and what it refuses."""

import json
import shutil

import numpy as np
import pytest

from shardjax.export import Bags, CorruptModelError, export_model, load_model
from shardjax.network import Network
from tests.export.small import exported, small
from tests.helpers import run_python


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


@pytest.mark.parametrize(
    "name", ["rows/item.vectors.npy", "index/item.keys.npy", "params.npz", "model.json"]
)
def test_what_has_changed_is_not_served(folder, tmp_path, name):
    copy = tmp_path / "m"
    shutil.copytree(folder, copy)
    data = bytearray((copy / name).read_bytes())
    data[-20] ^= 64
    (copy / name).write_bytes(data)
    if name == "model.json":
        (copy / name).write_bytes(data[:-9])
    with pytest.raises(CorruptModelError, match=r"is not what was written.*Export the"):
        load_model(copy)
    (copy / name).write_bytes(data[:-9])
    with pytest.raises(CorruptModelError, match="must have .* bytes, got|not what was"):
        load_model(copy, verify=False)
    (copy / "params.npz").unlink()
    if name != "model.json":
        with pytest.raises(CorruptModelError):
            load_model(copy, verify=False)


def test_a_missing_file_is_named(folder, tmp_path):
    copy = tmp_path / "m"
    shutil.copytree(folder, copy)
    (copy / "params.npz").unlink()
    with pytest.raises(CorruptModelError, match=r"'.*params.npz' is missing"):
        load_model(copy)


def test_an_empty_list_has_no_keys(folder):
    model = load_model(folder, verify=False)
    empty = model(np.zeros((2, 1)), {"f": Bags([], [0, 0])})
    np.testing.assert_array_equal(
        empty, model(np.zeros((2, 1)), {"f": Bags(np.zeros(0, np.int64), [0, 0])})
    )

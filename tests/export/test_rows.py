"""Rows in files: each row once with all that is known of it, wherever it lies."""

import json

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow.feather
import pytest

from shardjax.embed import LRU, EmbeddingCollection, FeatureSpec, ShowClick, TableSpec
from shardjax.export import export_rows
from shardjax.mesh import make_mesh
from tests.embed.test_policies import OPTIMIZERS, collection_of, storage_of, train_on


@pytest.fixture
def tiered(tmp_path_factory):
    """A collection and its state: rows on devices, in RAM and on disk."""
    tx = OPTIMIZERS["sgd"]
    user = TableSpec("user", 4, tx)
    item = TableSpec("item", 4, tx, evict=LRU(rows=10**6))
    collection = EmbeddingCollection(
        {"user": FeatureSpec(user), "bag": FeatureSpec(item, combiner="mean")},
        mesh=make_mesh("2x1"),
        storage=storage_of("disk", tmp_path_factory.mktemp("tiers")),
    )
    state = collection.init()
    values = np.random.default_rng(0).normal(size=(1280, 4))
    for name, keys in (
        ("user", np.arange(320)),
        ("item", np.arange(1280)),
        ("item", np.arange(640)),
    ):
        state = collection.load_rows(state, name, keys, values[: len(keys)])
    stats = collection.stats()["group0"]
    assert stats["device_rows"] and stats["host_rows"] and stats["disk_rows"]
    yield collection, state
    collection.close()


def described(folder, name):
    """What rows.json says of a table."""
    [table] = [
        t
        for t in json.loads((folder / "rows.json").read_text())["tables"]
        if t["name"] == name
    ]
    return table


def as_arrays(folder, format, name):
    """The columns of a table, in the order of its keys."""
    if format == "arrow":
        table = pd.read_feather(folder / f"{name}.arrow")
        found = {column: table[column].to_numpy() for column in table}
        found["vector"] = np.stack(list(found["vector"]))
    else:
        files = described(folder, name)["files"]
        found = {
            file.split(".")[-2]: np.load(folder / file, mmap_mode="r") for file in files
        }
        found = {
            {"keys": "key", "vectors": "vector"}.get(k, k): x for k, x in found.items()
        }
    order = np.argsort(found["key"])
    return {column: x[order] for column, x in found.items()}


@pytest.mark.parametrize("format", ["arrow", "npy"])
def test_rows_of_all_tiers_are_there_once(tiered, format, tmp_path):
    collection, tables = tiered
    counts = export_rows(
        collection, tables, tmp_path / "rows", format=format, chunk=320, step=12
    )
    assert list(counts) == ["user", "item"]
    for name in counts:
        found = as_arrays(tmp_path / "rows", format, name)
        assert list(found) == ["key", "vector", "last_step", "uses"]
        keys = np.sort(collection.keys(name))
        np.testing.assert_array_equal(found["key"], keys)
        assert len(keys) == counts[name]
        read = collection.lookup_rows(tables, name, keys)
        np.testing.assert_array_equal(found["vector"], read["rows"])
        [known] = collection.export(tables, name)
        order = np.argsort(known.keys)
        np.testing.assert_array_equal(found["last_step"], known.last_step[order])
        np.testing.assert_array_equal(found["uses"], known.uses[order])
        dtypes = {column: x.dtype.name for column, x in found.items()}
        assert described(tmp_path / "rows", name)["columns"] == dtypes
    about = json.loads((tmp_path / "rows" / "rows.json").read_text())
    assert about["step"] == 12 and about["seed"] == 0 and about["format"] == 1
    assert about["versions"].keys() == {"shardjax", "jax", "numpy"}
    item = described(tmp_path / "rows", "item")
    assert item["features"] == {"bag": "mean"} and item["vocabulary"] is None
    assert item["rows"] == counts["item"] and item["dim"] == 4


def test_an_arrow_file_has_a_part_at_a_time_and_fixed_lengths(tiered, tmp_path):
    export_rows(*tiered, tmp_path / "a", chunk=320)
    with pyarrow.ipc.open_file(tmp_path / "a" / "item.arrow") as file:
        assert file.num_record_batches > 2
        assert file.get_batch(0).num_rows == 320
        assert file.schema.field("vector").type == pyarrow.list_(pyarrow.float32(), 4)
        assert file.schema.field("key").type == pyarrow.uint64()


@pytest.mark.parametrize("format", ["arrow", "npy"])
def test_a_filter_says_which_rows(tiered, format, tmp_path):
    collection, tables = tiered
    seen = []

    def often(table, rows):
        seen.append((table, len(rows.keys)))
        assert rows.rows.shape == (len(rows.keys), 4)
        return rows.uses > 1

    counts = export_rows(
        collection, tables, tmp_path / "a", format=format, tables=["item"], filter=often
    )
    found = as_arrays(tmp_path / "a", format, "item")
    [known] = collection.export(tables, "item")
    assert seen == [("item", len(known.keys))]
    assert found["key"].tolist() == sorted(known.keys[known.uses > 1].tolist())
    assert counts == {"item": len(found["key"])} and 0 < counts["item"] < seen[0][1]
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert files == {"rows.json", *described(tmp_path / "a", "item")["files"]}


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            lambda rows: rows.uses,
            TypeError,
            r"`filter` must return a bool per row, \[.*\] for this part of table 'item',"
            r" got dtype uint32\. Compare, such as",
        ),
        (lambda rows: np.array(True), ValueError, r"table 'item', got shape \(\)"),
        (lambda rows: rows.rows > 0, ValueError, r"got shape \(\d+, 4\)"),
        (lambda rows: [True], ValueError, r"got shape \(1,\)"),
    ],
)
def test_a_filter_of_another_kind_is_an_error(mask, error, message, tmp_path):
    collection = collection_of(evict=LRU(rows=10**6))
    state, _ = train_on(collection, collection.init(), [1, 2])
    with pytest.raises(error, match=message):
        export_rows(
            collection,
            state,
            tmp_path / "a",
            format="npy",
            filter=lambda table, rows: mask(rows),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "csv"}, ValueError, "`format` .* 'arrow' or 'npy', got 'csv'"),
        ({"tables": "item"}, TypeError, r"a sequence of names, got the text 'item'"),
        ({"tables": ["shop"]}, KeyError, r"no table is named 'shop'.*\['item'\]"),
        ({"tables": []}, ValueError, r"must name at least one table, .* got \[\]"),
        ({"tables": ["item"] * 2}, ValueError, r"each once, got \['item', 'item'\]"),
        ({"chunk": 0}, ValueError, "`chunk` of rows to export must be in"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(options, error, message, tmp_path):
    collection = collection_of()
    with pytest.raises(error, match=message):
        export_rows(collection, collection.init(), tmp_path / "a", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["arrow", "npy"])
def test_tables_without_rows_have_files_too(format, tmp_path):
    collection = collection_of(evict=ShowClick(0.9, 0.0))
    state = collection.init()
    counts = export_rows(collection, state, tmp_path / "a", format=format)
    assert counts == {"item": 0}
    table = described(tmp_path / "a", "item")
    assert list(table["columns"]) == ["key", "vector", "last_step", "score"]
    if format == "npy":
        vectors = np.load(tmp_path / "a" / "item.vectors.npy", mmap_mode="r")
        assert vectors.shape == (0, 4) and vectors.dtype == np.float32
    else:
        assert len(pd.read_feather(tmp_path / "a" / "item.arrow")) == 0


@pytest.mark.parametrize("format", ["arrow", "npy"])
@pytest.mark.parametrize(
    ("dtype", "written"), [("bfloat16", "float32"), ("float16", "float16")]
)
def test_other_dtypes_and_names(format, dtype, written, tmp_path):
    name = "../sho p/é"
    spec = TableSpec(name, 3, OPTIMIZERS["sgd"], dtype=dtype)
    collection = EmbeddingCollection({"f": FeatureSpec(spec)}, mesh=make_mesh("1x1"))
    values = np.array([[1 / 3, -2, 5e-3], [1, 2, 3]])
    state = collection.load_rows(
        collection.init(), name, np.array([2**64 - 1, 0], np.uint64), values
    )
    export_rows(collection, state, tmp_path / "a", format=format)
    table = described(tmp_path / "a", name)
    assert table["dtype"] == dtype and table["columns"]["vector"] == written
    assert all(file.startswith("..%2Fsho p%2F%C3%A9.") for file in table["files"])
    if format == "arrow":
        found = pyarrow.feather.read_table(tmp_path / "a" / table["files"][0])
        keys = found["key"].to_pylist()
        vectors = np.array(found["vector"].to_pylist(), np.float32)
    else:
        files = {file.split(".")[-2]: tmp_path / "a" / file for file in table["files"]}
        keys, vectors = np.load(files["keys"]).tolist(), np.load(files["vectors"])
        assert vectors.dtype == written
    expected = values.astype(jnp.dtype(dtype)).astype(np.float32)
    order = np.argsort(keys)
    np.testing.assert_array_equal(vectors[order].astype(np.float32), expected[::-1])
    assert sorted(keys) == [0, 2**64 - 1]


def test_a_folder_with_files_is_kept_unless_it_is_to_be_replaced(tmp_path):
    collection = collection_of()
    state, _ = train_on(collection, collection.init(), [1, 2])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="an export needs a folder of its own"):
        export_rows(collection, state, tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(FileExistsError, match="the place of an export alone"):
        export_rows(collection, state, tmp_path / "a", replace=True)
    (tmp_path / "a" / "rows.json").write_text("{}")
    assert export_rows(collection, state, tmp_path / "a", replace=True) == {"item": 2}
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        *("item.arrow", "rows.json")
    ]


@pytest.mark.parametrize("format", ["arrow", "npy"])
def test_a_table_whose_name_is_a_dot(format, tmp_path):
    table = TableSpec(".", 2)
    collection = EmbeddingCollection({"f": FeatureSpec(table)}, mesh=make_mesh("1x1"))
    state = collection.load_rows(collection.init(), ".", [7], np.ones((1, 2)))
    assert export_rows(collection, state, tmp_path / "a", format=format) == {".": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert len(list((tmp_path / "a").iterdir())) == {"arrow": 2, "npy": 3}[format]

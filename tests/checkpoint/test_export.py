"""Rows of checkpoints in files: those of the state that was saved."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest

from shardjax.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    StepFolder,
    export_checkpoint,
)
from shardjax.checkpoint.__main__ import main
from shardjax.checkpoint.chain import chain_of
from shardjax.embed import (
    LRU,
    EmbeddingCollection,
    FeatureSpec,
    ShowClick,
    TableSpec,
)
from shardjax.export import export_rows
from shardjax.mesh import make_mesh
from shardjax.state import TrainState
from tests.helpers import run_python

ADAM = optax.adam(0.01)


def state_of(tables):
    return TrainState(jnp.int32(0), {}, {}, (), None, tables, {})


def values(keys, seed):
    return np.random.default_rng(seed).normal(size=(len(keys), 4))


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """A folder with the steps 5 (all rows), 10 and 15 (increments), and the rows of then
    as `export_rows` writes them."""
    path = tmp_path_factory.mktemp("export")
    item = TableSpec("item", 4, ADAM, evict=LRU(rows=850))
    features = {"user": TableSpec("user", 4, ADAM), "item": item}
    features |= {"few": TableSpec("few", 2, dtype=jnp.bfloat16)}
    collection = EmbeddingCollection(
        {name: FeatureSpec(table) for name, table in features.items()},
        mesh=make_mesh("2x1"),
    )
    tables = collection.init()
    few = np.array([[1 / 3, 2], [3, 4]])
    tables = collection.load_rows(tables, "few", [1, 2], few)
    with Checkpointer(
        path / "run", collection=collection, full_every=9
    ) as checkpointer:
        for step, changes in (
            (5, {"user": range(100), "item": range(900)}),
            (10, {"item": range(50), "user": [2000]}),
            (15, {"item": [3, 899, 3000], "user": [2000]}),
        ):
            for name, keys in changes.items():
                keys = np.array(keys)
                tables = collection.load_rows(tables, name, keys, values(keys, step))
            checkpointer.save(step, state_of(tables))
            checkpointer.wait(state_of(tables))
            rows = path / f"rows_{step}"
            export_rows(collection, tables, rows, format="npy", step=step)
            if step == 5:
                assert collection.shrink() == {"item": 50}  # gone with the next rows
        chain = chain_of(checkpointer._folder, 15)
        assert [part.step for part in chain] == [15, 10, 5]
        assert sum(chain[1].details["rows"]["removed"]) == 50
    return path


@pytest.fixture
def path(made_once, tmp_path):
    """A copy of it."""
    shutil.copytree(made_once, tmp_path / "copy")
    return tmp_path / "copy"


def in_order(folder, name):
    """The arrays of a table in the order of its keys."""
    tables = json.loads((folder / "rows.json").read_text())["tables"]
    [table] = [t for t in tables if t["name"] == name]
    arrays = dict(zip(table["columns"], table["files"], strict=True))
    found = {column: np.load(folder / file) for column, file in arrays.items()}
    order = np.argsort(found["key"])
    return {column: x[order] for column, x in found.items()}


def assert_alike(a, b):
    assert list(a) == list(b)
    for column, x in a.items():
        assert x.dtype == b[column].dtype
        np.testing.assert_array_equal(x, b[column], err_msg=column)


@pytest.mark.parametrize("step", [5, 10, 15, None])
def test_rows_are_those_of_the_step(made_once, step, tmp_path):
    counts = export_checkpoint(made_once / "run", tmp_path / "a", step, format="npy")
    expected = made_once / f"rows_{step or 15}"
    assert list(counts) == ["user", "item", "few"] and counts["few"] == 2
    assert counts["user"] == 100 + (step != 5)
    assert counts["item"] == 900 if step == 5 else 850 <= counts["item"] < 880
    for name in counts:
        assert counts[name] == len(in_order(expected, name)["key"])
        assert_alike(in_order(tmp_path / "a", name), in_order(expected, name))
    about, other = (
        json.loads((folder / "rows.json").read_text())
        for folder in (tmp_path / "a", expected)
    )
    for table, more in zip(about.pop("tables"), other.pop("tables"), strict=True):
        assert table == {name: more[name] for name in table}
    assert about == other


def test_arrow_files_of_some_rows_of_some_tables(made_once, tmp_path):
    seen = []

    def often(table, rows):
        seen.append((table, len(rows.keys), [x.shape[1:] for x in rows.row_state]))
        return rows.uses > 1

    told = []
    counts = export_checkpoint(
        made_once / "run",
        tmp_path / "a",
        tables=["item"],
        filter=often,
        progress=told.append,
    )
    found = pd.read_feather(tmp_path / "a" / "item.arrow").sort_values("key")
    expected = in_order(made_once / "rows_15", "item")
    chosen = expected["uses"] > 1
    assert found["key"].tolist() == expected["key"][chosen].tolist()
    np.testing.assert_array_equal(
        np.stack(found["vector"].tolist()), expected["vector"][chosen]
    )
    assert counts == {"item": int(chosen.sum())} and 40 < counts["item"] < 60
    assert sum(n for _, n, _ in seen) == len(chosen)
    assert {(name, *shapes) for name, _, shapes in seen} == {("item", (4,), (4,))}
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"item.arrow", "rows.json"}
    with StepFolder(made_once / "run", write=False) as folder:
        assert sum(told) == sum(part.size for part in chain_of(folder, 15))


def test_scores(tmp_path):
    item = TableSpec("item", 4, ADAM, evict=ShowClick(0.9, 0.0))
    collection = EmbeddingCollection({"item": FeatureSpec(item)}, mesh=make_mesh("1x1"))
    keys = np.arange(5)
    tables = collection.load_rows(collection.init(), "item", keys, values(keys, 0))
    tables = collection.load_rows(tables, "item", keys[:2], values(keys[:2], 1))
    with Checkpointer(tmp_path / "run", collection=collection) as checkpointer:
        checkpointer.save(1, state_of(tables))
        checkpointer.wait(state_of(tables))
    export_rows(collection, tables, tmp_path / "a", format="npy")
    export_checkpoint(tmp_path / "run", tmp_path / "b", format="npy")
    found = in_order(tmp_path / "b", "item")
    assert_alike(found, in_order(tmp_path / "a", "item"))
    assert len(set(found["score"].tolist())) == 2


def damage(run):
    [file] = (run / "step_5" / "tables" / "group0").rglob("0/0")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def lose(run):
    shutil.rmtree(run / "step_5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage, "step 5 in .* is not what was written: bytes of .* have changed"),
        (lose, "step 10 in .*: step 5, whose rows it goes on from, is missing"),
    ],
)
def test_a_step_that_is_not_what_was_written(path, change, message, tmp_path):
    change(path / "run")
    with pytest.raises(CorruptCheckpointError, match=message):
        export_checkpoint(path / "run", tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 7}, FileNotFoundError, "no step 7 in .*; there are 5, 10, 15"),
        ({"format": "csv"}, ValueError, "'arrow' or 'npy', got 'csv'"),
        ({"tables": ["shop"]}, KeyError, "no table is named 'shop'; the tables are"),
        ({"filter": lambda name, rows: rows.keys}, TypeError, "got dtype uint64"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(
    made_once, options, error, message, tmp_path
):
    with pytest.raises(error, match=message):
        export_checkpoint(made_once / "run", tmp_path / "a", **options)
    assert list(tmp_path.iterdir()) == []


def test_steps_without_tables_and_folders_without_steps(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(
            FileNotFoundError, match="there are no steps in .* to export"
        ):
            export_checkpoint(tmp_path / "run", tmp_path / "a")
        checkpointer.save(3, {"w": jnp.ones(2)})
        checkpointer.wait()
    with pytest.raises(ValueError, match="step 3 in .* has no embedding tables"):
        export_checkpoint(tmp_path / "run", tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="checkpoints are read from a folder"):
        export_checkpoint(tmp_path / "gone", tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def call(capsys, *arguments):
    """Exit code and what is printed."""
    code = main([str(x) for x in arguments])
    return code, *capsys.readouterr()


def test_the_command(made_once, tmp_path, capsys):
    run, out = made_once / "run", tmp_path / "a"
    assert call(capsys, "export", run, out) == (
        0,
        "step 15: 101 rows of table 'user'\n"
        f"step 15: {len(in_order(made_once / 'rows_15', 'item')['key'])} rows of table"
        " 'item'\n"
        "step 15: 2 rows of table 'few'\n",
        "",
    )
    assert sorted(p.suffix for p in out.iterdir()) == [".arrow"] * 3 + [".json"]
    code, printed, error = call(capsys, "export", run, out)
    assert (code, printed) == (2, "") and "has files in it" in error
    options = ["--replace", "--step", 5, "--format", "npy", "--table", "item"]
    code, printed, _ = call(capsys, "export", run, out, *options, "--min-uses", 2)
    assert (code, printed) == (0, "step 5: 0 rows of table 'item'\n")
    assert {p.suffix for p in out.iterdir()} == {".npy", ".json"}
    for more, message in (
        (["--table", "shop"], "error: no table is named 'shop'; the tables are"),
        (["--min-uses", 2], "error: of table 'few' nobody has kept how often its rows"),
    ):
        code, printed, error = call(capsys, "export", run, tmp_path / "b", *more)
        assert (code, printed) == (2, "") and error.startswith(message)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_command_says_what_is_wrong_with_a_step(path, tmp_path, capsys):
    damage(path / "run")
    code, printed, error = call(capsys, "export", path / "run", tmp_path / "a")
    assert (code, printed) == (1, "") and "is not what was written" in error
    assert not (tmp_path / "a").exists()


def test_no_device_is_needed(made_once, tmp_path):
    program = """
import sys
import jax
jax.config.update("jax_platforms", "none")  # whoever asks for devices gets an error
from shardjax.checkpoint.__main__ import main
sys.exit(main(["export", *sys.argv[1:]]))
"""
    done = run_python(program, str(made_once / "run"), str(tmp_path / "a"))
    assert "rows of table 'item'" in done.stdout
    found = pd.read_feather(tmp_path / "a" / "few.arrow")
    assert np.stack(found["vector"].tolist()).dtype == np.float32


@pytest.mark.parametrize("inner", [".", "..", "step_5/.."])
def test_an_export_is_apart_from_the_checkpoints(tmp_path, inner):
    (tmp_path / "run" / "step_5").mkdir(parents=True)
    (tmp_path / "rows.json").write_text("{}")
    (tmp_path / "run" / "rows.json").write_text("{}")
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="must be apart from the checkpoints in"):
        export_checkpoint(run, run / inner, replace=True)
    assert run.is_dir()

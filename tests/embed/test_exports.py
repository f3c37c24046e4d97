"""What `export` gives: every row once, with its optimizer state and what policies know."""

import numpy as np
import pytest

from shardjax.embed import LRU, ShowClick, TableRows
from tests.embed.test_policies import (
    STORAGES,
    Model,
    bag_of,
    collection_of,
    salt_of,
    storage_of,
    train_on,
)
from tests.embed.test_tiers import Run, batches

KEPT = {"lru": LRU(rows=10**6), "show_click": ShowClick(0.9, 0.0)}


def join(parts: list[TableRows]) -> TableRows:
    """All rows in the order of their keys."""
    order = np.argsort(np.concatenate([p.keys for p in parts]))

    def field(read):
        values = [read(p) for p in parts]
        return None if values[0] is None else np.concatenate(values)[order]

    leaves = range(len(parts[0].row_state))
    return TableRows(
        field(lambda p: p.keys),
        field(lambda p: p.rows),
        [field(lambda p, i=i: p.row_state[i]) for i in leaves],
        field(lambda p: p.last_step),
        field(lambda p: p.uses),
        field(lambda p: p.scores),
    )


def exported(collection, state, chunk=65536):
    return join(list(collection.export(state, "item", chunk)))


@pytest.mark.parametrize("policy", list(KEPT))
@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_each_row_is_given_whole_wherever_it_lies(mesh, storage, policy, tmp_path):
    place = storage_of(storage, tmp_path)
    run = Run(mesh, "adam", place, 3, evict=KEPT[policy])
    model = Model(run.features["bag"].table, salt_of(run.collection))
    made = batches(12)
    run.train(made)
    for batch in made:
        model.batch(*bag_of(batch))
    tables = run.state.tables
    parts = list(run.collection.export(tables, "item", chunk=70))
    assert len(parts) > 2 and max(len(p.keys) for p in parts) == 70
    found = join(parts)
    assert found.keys.tolist() == sorted(model.rows)
    read = run.collection.lookup_rows(tables, "item", found.keys)
    np.testing.assert_array_equal(found.rows, read["rows"])
    assert len(found.row_state) == len(read["row_state"]) == 2
    for x, y in zip(found.row_state, read["row_state"], strict=True):
        assert x.any()
        np.testing.assert_array_equal(x, y)
    known = np.array([model.rows[int(k)] for k in found.keys])
    np.testing.assert_array_equal(found.last_step, known[:, 0])
    if policy == "lru":
        assert found.scores is None
        np.testing.assert_array_equal(found.uses, known[:, 1])
    else:
        assert found.uses is None
        np.testing.assert_array_equal(found.scores, known[:, 1] / 4096)
    stats = run.collection.stats()["group0"]
    assert (stats["host_rows"] > 0) == (storage != "devices")
    assert (stats["disk_rows"] > 0) == (storage == "disk")
    run.collection.close()


@pytest.mark.parametrize("storage", list(STORAGES))
def test_rows_about_to_leave_are_given_as_they_were(storage, tmp_path):
    place = storage_of(storage, tmp_path)
    run = Run("4x2", "adam", place, 3, evict=LRU(rows=10))
    run.train(batches(12))
    tables = run.state.tables
    before = exported(run.collection, tables)
    assert run.collection.shrink() == {"item": len(before.keys) - 10}
    after = exported(run.collection, tables)
    for name in ("keys", "rows", "last_step", "uses"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    run.train(batches(1))
    left = exported(run.collection, run.state.tables)
    assert len(left.keys) < len(before.keys)
    run.collection.close()


def test_what_nobody_keeps_is_none():
    collection = collection_of()
    state, _ = train_on(collection, collection.init(), [1, 2])
    found = exported(collection, state)
    assert (found.last_step, found.uses, found.scores) == (None, None, None)
    assert found.keys.tolist() == [1, 2]


def test_batches_that_wait_count_and_their_new_rows_are_not_there():
    collection = collection_of(evict=LRU(rows=10**6))
    state, _ = train_on(collection, collection.init(), [1, 2])
    collection.plan({"item": np.array([2, 3])}, 2, train=True)
    found = exported(collection, state)
    assert found.keys.tolist() == [1, 2]
    assert found.last_step is not None and found.uses is not None
    assert found.last_step.tolist() == [1, 2] and found.uses.tolist() == [1, 2]


def test_a_key_that_left_and_comes_again_is_the_row_before():
    collection = collection_of(evict=LRU(rows=1))
    state, _ = train_on(collection, collection.init(), [1], [1], [2])
    assert collection.shrink() == {"item": 1}
    collection.plan({"item": np.array([1])}, 1, train=True)
    found = exported(collection, state)
    assert found.keys.tolist() == [1, 2]
    assert found.last_step is not None and found.uses is not None
    assert found.last_step.tolist() == [2, 3] and found.uses.tolist() == [2, 1]


def test_a_table_without_rows_gives_no_part():
    collection = collection_of()
    assert list(collection.export(collection.init(), "item")) == []


@pytest.mark.parametrize(
    ("table", "chunk", "error", "message"),
    [
        ("shop", 9, KeyError, "no table is named 'shop'"),
        ("item", 0, ValueError, r"`chunk` of rows to export must be in \[1, .*got 0"),
        ("item", 2.5, TypeError, "`chunk` of rows to export must be an integer"),
    ],
)
def test_what_cannot_be_exported_is_an_error_at_once(table, chunk, error, message):
    collection = collection_of()
    with pytest.raises(error, match=message):
        collection.export(collection.init(), table, chunk)

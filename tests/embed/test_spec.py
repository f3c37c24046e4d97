import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Storage,
    TableSpec,
    rowwise_adagrad,
    uniform,
    zeros,
)
from shardjax.embed.groups import plan_groups
from shardjax.mesh import make_mesh

ITEM = TableSpec("item", 4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"name": ""},
            ValueError,
            "`name` of a table must be a non-empty text, got ''",
        ),
        ({"name": 3}, ValueError, "`name` of a table must be a non-empty text, got 3"),
        ({"dim": 0}, ValueError, r"`dim` of table 'item' must be in \[1, .*, got 0"),
        ({"dim": 2.0}, TypeError, "`dim` of table 'item' must be an integer, got 2.0"),
        (
            {"dim": True},
            TypeError,
            "`dim` of table 'item' must be an integer, got True",
        ),
        (
            {"capacity": 0},
            ValueError,
            "`capacity` of table 'item' must be in .*, got 0",
        ),
        ({"capacity": "9"}, TypeError, "`capacity` of table 'item' must be an integer"),
        ({"vocabulary": -1}, ValueError, "`vocabulary` of table 'item' must be in"),
        ({"vocabulary": 2**31}, ValueError, "`vocabulary` of table 'item' must be in"),
        (
            {"vocabulary": 5, "capacity": 6},
            ValueError,
            r"table 'item' must not have both `capacity` \(6\) and `vocabulary` \(5\)",
        ),
        (
            {"placement": "column_wise"},
            ValueError,
            "`placement` of table 'item' must be one of 'row_wise', 'table_wise',"
            " 'data_parallel', got 'column_wise'",
        ),
        (
            {"on_full": "drop"},
            ValueError,
            "`on_full` of table 'item' must be one of 'error', 'reject', got 'drop'",
        ),
        (
            {"dtype": np.int32},
            TypeError,
            "`dtype` of table 'item' must be a float type",
        ),
        ({"dtype": np.float64}, ValueError, "must be enabled in JAX, got float64"),
        (
            {"initializer": 0.1},
            TypeError,
            "`initializer` of table 'item' must be a func",
        ),
        ({"optimizer": "adam"}, TypeError, "must be an optax.GradientTransformation"),
        (
            {"optimizer": optax.adam},
            TypeError,
            "must be an optax.GradientTransformation",
        ),
    ],
)
def test_bad_tables_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        TableSpec(**({"name": "item", "dim": 4} | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"table": "item"},
            TypeError,
            "`table` of a feature must be a TableSpec, got 'i",
        ),
        (
            {"combiner": "max"},
            ValueError,
            "`combiner` of a feature of table 'item' must be one of 'sum', 'mean',"
            " 'sqrtn', 'none', got 'max'",
        ),
        (
            {"on_bad_id": "clip"},
            ValueError,
            "must be one of 'error', 'zero', 'drop', got",
        ),
        (
            {"on_long": "cut"},
            ValueError,
            "must be one of 'error', 'first', 'last', got",
        ),
        ({"max_length": 3}, ValueError, "is for combiner 'none', got combiner 'sum'"),
        (
            {"max_length": 0, "combiner": "none"},
            ValueError,
            "`max_length` of a feature of table 'item' must be in",
        ),
        (
            {"combiner": "none", "on_long": "last"},
            ValueError,
            "`on_long` of a feature of table 'item' needs a `max_length`",
        ),
        (
            {"padding_id": 2**64},
            ValueError,
            "must fit 64 bits, got 18446744073709551616",
        ),
        (
            {"padding_id": -(2**63) - 1},
            ValueError,
            "must fit 64 bits, got -92233720368",
        ),
    ],
)
def test_bad_features_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        FeatureSpec(**({"table": ITEM} | changes))


def test_negative_scale_is_refused():
    with pytest.raises(ValueError, match="`scale` must not be negative, got -1"):
        uniform(-1)


def test_initializers():
    rows = uniform(0.25)(jax.random.key(0), (1000,), jnp.float32)
    assert 0.24 < float(jnp.max(jnp.abs(rows))) <= 0.25
    assert abs(float(jnp.mean(rows))) < 0.02
    assert not zeros()(jax.random.key(0), (3,), jnp.bfloat16).any()


def test_a_vocabulary_bounds_the_rows():
    assert TableSpec("a", 1, vocabulary=7).max_rows == 7
    assert TableSpec("a", 1, capacity=8).max_rows == 8
    assert TableSpec("a", 1).max_rows == 2**31 - 2


def test_specs_are_hashable_and_equal_by_value():
    assert TableSpec("item", 4) == ITEM
    assert hash(FeatureSpec(TableSpec("item", 4))) == hash(FeatureSpec(ITEM))
    assert TableSpec("item", 4, dtype="bfloat16").dtype == jnp.bfloat16


def groups_of(*tables, devices=4):
    features = {t.name: FeatureSpec(t) for t in tables}
    return [[t.spec.name for t in g.tables] for g in plan_groups(features, devices)]


def test_tables_that_can_share_a_slab_do():
    adam = optax.adam(0.1)
    tables = [
        TableSpec("a", 4),
        TableSpec("b", 4, placement="table_wise"),
        TableSpec("c", 8),
        TableSpec("d", 4, adam),
        TableSpec("e", 4, dtype=jnp.bfloat16),
        TableSpec("f", 4, placement="data_parallel"),
        TableSpec("g", 4, initializer=zeros(), vocabulary=3),
        TableSpec("h", 4, adam, capacity=3),
        TableSpec("i", 4, optax.adam(0.1)),
    ]
    expected = [["a", "b", "g"], ["c"], ["d", "h"], ["e"], ["f"], ["i"]]
    assert groups_of(*tables) == expected


def test_whole_tables_go_to_the_least_loaded_device():
    sizes = {"a": 10, "b": 40, "c": 30, "d": 25, "e": 1}
    features = {
        name: FeatureSpec(TableSpec(name, 4, capacity=n, placement="table_wise"))
        for name, n in sizes.items()
    }
    (group,) = plan_groups(features, 3)
    owners = {t.spec.name: t.owner for t in group.tables}
    assert owners == {"b": 0, "c": 1, "d": 2, "a": 2, "e": 1}
    assert {t.owner for t in plan_groups({"x": FeatureSpec(ITEM)}, 3)[0].tables} == {-1}


def test_features_share_a_table_by_its_spec():
    again = TableSpec("item", 4)
    (group,) = plan_groups({"x": FeatureSpec(ITEM), "y": FeatureSpec(again, "mean")}, 2)
    (table,) = group.tables
    assert table.features == ("x", "y")


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ({}, ValueError, "a collection needs at least one feature, got none"),
        ({"x": ITEM}, TypeError, r"feature 'x' must be a FeatureSpec, got TableSpec\("),
        (
            {"x": FeatureSpec(ITEM), "y": FeatureSpec(TableSpec("item", 8))},
            ValueError,
            "two different tables are named 'item'. Give each its own name",
        ),
    ],
)
def test_bad_collections_are_refused(features, error, message):
    with pytest.raises(error, match=message):
        EmbeddingCollection(features, mesh=make_mesh("1x1"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"initial_rows": 0}, ValueError, "`initial_rows` must be positive, got 0"),
        ({"threads": 0}, ValueError, "`threads` must be positive, got 0"),
        ({"storage": 9}, TypeError, r"`storage` must be a Storage\(device_rows=...\)"),
        ({"seed": 1.5}, TypeError, "`seed` must be an integer, got 1.5"),
        ({"seed": True}, TypeError, "`seed` must be an integer, got True"),
    ],
)
def test_bad_settings_of_a_collection_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        EmbeddingCollection({"x": FeatureSpec(ITEM)}, mesh=make_mesh("1x1"), **changes)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ({"learning_rate": -1.0}, "learning_rate", "-1.0"),
        ({"learning_rate": float("nan")}, "learning_rate", "nan"),
        (
            {"learning_rate": 1.0, "initial_accumulator": -2},
            "initial_accumulator",
            "-2",
        ),
        ({"learning_rate": 1.0, "eps": -3}, "eps", "-3"),
    ],
)
def test_bad_settings_of_rowwise_adagrad_are_refused(arguments, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must not be negative, got {value}"):
        rowwise_adagrad(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"storage": "disk"},
            TypeError,
            "`storage` of table 'item' must be a Storage, 'device' or None, got 'disk'",
        ),
        (
            {"storage": Storage(device_rows=9), "placement": "data_parallel"},
            ValueError,
            "`storage` of table 'item' must be None or 'device': with placement",
        ),
    ],
)
def test_a_storage_that_does_not_fit_a_table_is_an_error(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(ITEM, **changes)


def test_bytes_on_disk_need_a_folder():
    with pytest.raises(
        ValueError, match="`disk_bytes` is about the files in `disk`, got"
    ):
        Storage(device_rows=9, disk_bytes="1GB")

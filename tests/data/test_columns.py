"""What columns are for: each rule of inference, and options that overrule it."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from shardjax.data import infer_columns
from shardjax.data.arrow_types import values_of
from shardjax.data.columns import check_names

ROWS = 1000
RNG = np.random.default_rng(0)
DATE = datetime.date(2024, 1, 1)


def kind_of(name, values):
    """Infers a column beside a label."""
    table = pa.table({"click": np.arange(len(values)) % 2, name: values})
    column = infer_columns(table).columns[1]
    assert column.reason
    return column.kind


COUNTS = np.round(RNG.exponential(200, ROWS)).astype(np.int64)
IDS = RNG.integers(0, 2**40, ROWS)

CASES = {
    "counts": ("impression", COUNTS, "dense"),
    "negative counts": ("balance", -COUNTS, "dense"),
    "few integers": ("position", RNG.integers(1, 33, ROWS), "categorical"),
    "one more": ("age", np.arange(ROWS) * 7 % 33, "dense"),
    "large integers": ("campaign", IDS, "categorical"),
    "hash above int64": ("ad", IDS.astype(np.uint64) + np.uint64(2**63), "categorical"),
    "id by name": ("item_id", COUNTS, "categorical"),
    "camel case": ("userId", COUNTS, "categorical"),
    "in one word": ("userid", COUNTS, "categorical"),
    "capitals": ("ITEM_ID", COUNTS, "categorical"),
    "not an id": ("bid", COUNTS, "dense"),
    "hash by name": ("url_hash", COUNTS, "categorical"),
    "float id": ("query_id", np.append(COUNTS[1:] * 1.0, np.nan), "categorical"),
    "Criteo C": ("C7", COUNTS, "categorical"),
    "Criteo I": ("I10", RNG.integers(0, 5, ROWS), "dense"),
    "unix time": ("timestamp", 1_260_000_000 + IDS % 10**8, "drop"),
    "a duration": ("watch_time", COUNTS, "dense"),
    "an hour": ("hour", RNG.integers(0, 24, ROWS), "categorical"),
    "row number": ("", np.arange(ROWS), "drop"),
    "row number from 5": ("nr", np.arange(5, 5 + ROWS), "drop"),
    "ids in order": ("user_id", np.arange(ROWS), "categorical"),
    "unique id": ("id", RNG.permutation(ROWS), "drop"),
    "text id": ("id", [f"x{i}" for i in range(ROWS)], "drop"),
    "repeated id": ("id", np.arange(ROWS) // 2, "categorical"),
    "two rows": ("nr", [3, 4], "categorical"),
    "floats": ("price", RNG.normal(size=ROWS), "dense"),
    "whole floats": ("price", np.round(RNG.normal(size=ROWS)), "dense"),
    "floats too large": ("ad", IDS * 1e9, "categorical"),
    "float16": ("price", RNG.normal(size=ROWS).astype(np.float16), "dense"),
    "decimals": ("price", [decimal.Decimal("1.50"), None], "dense"),
    "booleans": ("is_new", RNG.random(ROWS) < 0.5, "categorical"),
    "text": ("city", ["Rome", "Oslo", None], "categorical"),
    "bytes": ("city", [b"Rome", b"Oslo"], "categorical"),
    "text views": ("city", pa.array(["Rome", "Oslo"], pa.string_view()), "categorical"),
    "fixed bytes": ("city", pa.array([b"ab", b"cd"], pa.binary(2)), "categorical"),
    "separated text": ("genres", ["Drama", "Drama|War"], "bag"),
    "dictionary": ("city", pa.array(["a", "b|c"]).dictionary_encode(), "bag"),
    "dates as text": ("when", ["2024-01-01", "2024-01-02 10:00:00.5+00:00"], "drop"),
    "dates and text": ("when", ["2024-01-01", "yesterday"], "categorical"),
    "dates": ("when", pa.array([DATE, DATE]), "drop"),
    "timestamps": ("when", pa.array([1, 2], pa.timestamp("s")), "drop"),
    "lists": ("tags", [[1, 2], []], "bag"),
    "lists of text": ("tags", [["a"], None], "bag"),
    "fixed lists": ("tags", pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)), "bag"),
    "list views": ("tags", pa.array([[1], []], pa.list_view(pa.int8())), "bag"),
    "lists of floats": ("vector", [[0.5], [1.5]], "drop"),
    "structs": ("more", [{"a": 1}, {"a": 2}], "drop"),
    "nulls": ("nothing", pa.nulls(2), "drop"),
    "no numbers yet": ("price", pa.nulls(2, pa.float32()), "dense"),
    "no text yet": ("city", pa.nulls(2, pa.string()), "categorical"),
}


@pytest.mark.parametrize(("name", "values", "kind"), CASES.values(), ids=CASES)
def test_kinds_are_inferred(name, values, kind):
    assert kind_of(name, values) == kind


def test_a_single_batch_and_chunks_are_samples_alike():
    table = pa.table({"y": [0, 1], "item": ["a", "b"]})
    parts = pa.concat_tables([table, table.slice(0, 0), table])
    expected = infer_columns(table)
    assert infer_columns(parts) == infer_columns(table.to_batches()[0]) == expected


def columns_of(**options):
    table = pa.table(
        {
            "label": [0, 1],
            "user_id": [1, 2],
            "price": [0.5, 1.5],
            "tags": ["a|b", "c"],
            "extra": [3, 4],
        }
    )
    return infer_columns(table, **options)


def test_options_overrule_what_is_inferred_and_the_rest_is_inferred():
    columns = columns_of(
        label="extra", dense=["user_id"], categorical=["price", "tags"], drop=["label"]
    )
    assert columns.label == "extra"
    assert columns.names("dense") == ("user_id",)
    assert columns.names("categorical") == ("price", "tags")
    assert columns.feature_names == ("price", "tags")
    assert columns.used == ("user_id", "price", "tags", "extra")
    assert columns_of().names("bag") == ("tags",)
    assert columns_of(bag_separator=";").names("bag") == ()
    assert columns_of(bags=["extra"]).names("bag") == ("tags", "extra")


def test_weights_are_no_feature_and_groups_stay_one():
    columns = columns_of(weight="price", group="user_id")
    assert (columns.weight, columns.group) == ("price", "user_id")
    assert columns.names("dense") == ()
    assert "user_id" in columns.names("categorical")
    dropped = columns_of(group="user_id", drop=["user_id"])
    assert "user_id" not in dropped.feature_names
    assert "user_id" in dropped.used
    assert columns_of().weight is None


def test_columns_print_as_a_table():
    printed = str(columns_of(group="user_id", dense=["extra"]))
    assert printed.splitlines() == [
        "column   kind                 values   why",
        "label    label                integer  a label's name",
        "user_id  categorical + group  integer  an id's name",
        "price    dense                number   numbers",
        "tags     bag                  text     text with '|' in it",
        "extra    dense                integer  as given",
    ]


@pytest.mark.parametrize("name", ["label", "click", "Target", "Y", "is_click"])
def test_a_label_is_known_by_its_name(name):
    assert infer_columns(pa.table({"a": [1], name: [0]})).label == name


def test_without_names_the_first_column_is_the_label():
    table = pa.table({"column_0": [0, 1], "column_1": [2, 3]})
    assert infer_columns(table).label == "column_0"
    assert infer_columns(table, label="column_1").label == "column_1"


def test_a_label_that_is_not_clear_must_be_named():
    with pytest.raises(
        ValueError, match="none has a label's name. Give `label`, one of"
    ):
        infer_columns(pa.table({"a": [1], "b": [0]}))
    both = pa.table({"click": [1], "label": [0]})
    with pytest.raises(ValueError, match=r"several could be: \['click', 'label'\]"):
        infer_columns(both)
    assert infer_columns(both, drop=["label"]).label == "click"
    assert infer_columns(both, label="label").names("categorical") == ("click",)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"dense": ["prize"]},
            ValueError,
            "`dense` names a column 'prize' that is not",
        ),
        ({"label": "lable"}, ValueError, "`label` names .* only: 'label', 'user_id'"),
        ({"group": "user"}, ValueError, "`group` names a column 'user' that is not"),
        ({"weight": "w"}, ValueError, "`weight` names a column 'w' that is not there"),
        (
            {"dense": ["price"], "drop": ["price"]},
            ValueError,
            "column 'price' must have one role, got `dense` and `drop`",
        ),
        ({"bags": "tags"}, TypeError, r"`bags` must be a list .* Give \['tags'\]"),
        ({"bag_separator": ""}, ValueError, "`bag_separator` must be one ASCII"),
        ({"dense_transform": "x"}, ValueError, "`dense_transform` must be 'log' or"),
        (
            {"labels": ["y"]},
            TypeError,
            "there is no option 'labels' for columns, only: l",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        columns_of(**options)


def test_names_must_differ():
    table = pa.table([pa.array([1]), pa.array([2])], names=["y", "y"])
    with pytest.raises(ValueError, match="column names must differ, got 'y' twice"):
        infer_columns(table)


def test_other_files_must_have_the_columns_of_the_first():
    columns = columns_of(drop=["extra"])
    check_names("b.csv", ["tags", "price", "user_id", "label"], columns)
    names = ["label", "user_id", "price", "tags", "extra"]
    for wrong in (names[1:], [*names, "new"], [*names, "label"]):
        with pytest.raises(
            ValueError, match=r"b.csv: columns must be those of the fir"
        ):
            check_names("b.csv", wrong, columns)


def test_types_are_named_by_what_they_hold():
    assert values_of(pa.list_(pa.float32())) == "list of number"
    assert values_of(pa.dictionary(pa.int8(), pa.string())) == "text"
    assert values_of(pa.fixed_shape_tensor(pa.int8(), [2])) == "list of integer"
    assert values_of(pa.struct([("a", pa.int8())])) == "struct<a: int8>"

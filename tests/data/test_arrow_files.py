"""Parquet and Arrow files: every type in every role, and the same from all formats."""

import datetime
import decimal
import gzip
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardjax.data import (
    MISSING_KEY,
    Batch,
    Source,
    arrow,
    criteo,
    csv,
    hash_strings,
    parquet,
)


def write_parquet(path, table):
    pq.write_table(table, path, row_group_size=7)


def write_ipc_file(path, table, **options):
    with pa.ipc.new_file(str(path), table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=7)


def write_compressed(path, table):
    write_ipc_file(path, table, options=pa.ipc.IpcWriteOptions(compression="zstd"))


def write_ipc_stream(path, table):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_ipc_stream_gzip(path, table):
    with gzip.open(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


FORMATS = {
    "parquet": (parquet, write_parquet),
    "file": (arrow, write_ipc_file),
    "compressed": (arrow, write_compressed),
    "stream": (arrow, write_ipc_stream),
    "gzip": (arrow, write_ipc_stream_gzip),
}


@pytest.fixture(params=FORMATS)
def stored(request, tmp_path):
    """Writes tables to files of a format; gives what reads them."""
    reader, write = FORMATS[request.param]

    def store(*tables, **options):
        paths = []
        for at, table in enumerate(tables):
            paths.append(tmp_path / f"part_{at}")
            write(paths[-1], table if isinstance(table, pa.Table) else pa.table(table))
        return reader(paths, **options)

    return store


def read(source):
    return Batch.concat(list(source.chunks()))


def key(text):
    return int(hash_strings([text])[0])


ROWS = 30
NUMBERS = np.arange(ROWS)


def test_a_log_in_every_format(stored):
    table = {
        "label": NUMBERS % 2,
        "count": pa.array([None, -1, *range(28)], pa.int16()),
        "item": pa.array([2**64 - 1, None, *range(28)], pa.uint64()),
        "city": ["Rome", None, *["Oslo"] * 28],
        "tags": [[1, 2], None, [], *[[7]] * 27],
        "words": ["a|b", "", None, *["c"] * 27],
        "unused": [{"a": 1}] * ROWS,
    }
    source = stored(table, chunk_rows=5, dense=["count"], categorical=["item"])
    protocol: type = Source
    assert isinstance(source, protocol)
    assert source.n_dense == 1
    assert source.feature_names == ("item", "city", "tags", "words")
    assert source.columns.names("drop") == ("unused",)
    batch = read(source)
    assert batch.feature_names == source.feature_names
    assert batch.labels.tolist() == (NUMBERS % 2).tolist()
    logs = [0, -math.log(2), *np.log1p(np.arange(28))]
    np.testing.assert_array_equal(batch.dense[:, 0], np.array(logs, np.float32))
    assert batch.fixed[0].tolist() == [2**64 - 1, MISSING_KEY, *range(28)]
    cities = [key("Rome"), MISSING_KEY, *[key("Oslo")] * 28]
    assert batch.fixed[1].tolist() == cities
    assert batch.jagged["tags"].values.tolist() == [1, 2, *[7] * 27]
    assert batch.jagged["tags"].lengths.tolist() == [2, 0, 0, *[1] * 27]
    words = [key("a"), key("b"), *[key("c")] * 27]
    assert batch.jagged["words"].values.tolist() == words
    assert batch.jagged["words"].lengths.tolist() == [2, 0, 0, *[1] * 27]


def test_a_pass_can_start_at_any_chunk(stored):
    table = {"y": NUMBERS % 2, "item_id": NUMBERS}
    for threads in (1, 3):
        source = stored(table, table, chunk_rows=3, threads=threads)
        chunks = list(source.chunks())
        # Groups of 7 rows are cut into 3, 3 and 1; the last group has 2 rows.
        assert [c.size for c in chunks] == ([3, 3, 1] * 4 + [2]) * 2
        for start in range(len(chunks) + 2):
            again = [c.fixed.tolist() for c in source.chunks(start)]
            assert again == [c.fixed.tolist() for c in chunks[start:]]


def one(stored, values, **options):
    """Reads one column beside a label, stored so that slices start anywhere."""
    table = pa.table({"y": np.zeros(len(values)), "x": values})
    return read(stored(table, chunk_rows=2, **options))


KEYS = {
    "int8": (pa.array([-1, None, 5], pa.int8()), [2**64 - 1, MISSING_KEY, 5]),
    "uint8": (pa.array([255, None, 5], pa.uint8()), [255, MISSING_KEY, 5]),
    "int64": (pa.array([-(2**63), 2**62, 0], pa.int64()), [2**63, 2**62, 0]),
    "uint32": (
        pa.array([2**32 - 1, 7, None], pa.uint32()),
        [2**32 - 1, 7, MISSING_KEY],
    ),
    "uint64": (pa.array([2**64 - 1, 2**53 + 1], pa.uint64()), [2**64 - 1, 2**53 + 1]),
    "boolean": (pa.array([True, False, None]), [1, 0, MISSING_KEY]),
    "floats": (pa.array([3.0, None, math.nan, -1]), [3, *[MISSING_KEY] * 2, 2**64 - 1]),
    "float32": (pa.array([3, None], pa.float32()), [3, MISSING_KEY]),
    "decimal": (pa.array([decimal.Decimal("12.00"), None]), [12, MISSING_KEY]),
    "string": (["7", None, "", "é"], [key("7"), MISSING_KEY, MISSING_KEY, key("é")]),
    "large": (pa.array(["a", None], pa.large_string()), [key("a"), MISSING_KEY]),
    "binary": (pa.array([b"\xff", None]), [key(b"\xff"), MISSING_KEY]),
    "fixed size": (pa.array([b"ab", None], pa.binary(2)), [key("ab"), MISSING_KEY]),
    "dictionary": (
        pa.array(["b", None, "a", "b"]).dictionary_encode(),
        [key("b"), MISSING_KEY, key("a"), key("b")],
    ),
    "dictionary of integers": (
        pa.array([9, None, 9, 4]).dictionary_encode(),
        [9, MISSING_KEY, 9, 4],
    ),
    "nothing": (pa.nulls(3), [MISSING_KEY] * 3),
}


@pytest.mark.parametrize(("values", "keys"), KEYS.values(), ids=KEYS)
def test_keys_of_every_type(stored, values, keys):
    batch = one(stored, values, categorical=["x"], group="x")
    assert batch.fixed[0].tolist() == keys
    assert batch.groups is not None
    assert batch.groups.tolist() == keys
    # As a bag: one key, or none where it is missing; an empty string is none either.
    bags = one(stored, values, bags=["x"]).jagged["x"]
    assert bags.values.tolist() == [k for k in keys if k != MISSING_KEY]
    assert bags.lengths.tolist() == [int(k != MISSING_KEY) for k in keys]


BAGS = {
    "integers": ([[1, 2], None, [], [-1]], [[1, 2], [], [], [2**64 - 1]]),
    "text": ([["a"], ["b", ""]], [[key("a")], [key("b"), MISSING_KEY]]),
    "missing": ([[1, None]], [[1, MISSING_KEY]]),
    "uint64": (
        pa.array([[2**64 - 1], [0]], pa.large_list(pa.uint64())),
        [[2**64 - 1], [0]],
    ),
    "fixed size": (
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
        [[1, 2], [], [3, 4]],
    ),
    "dictionary": (
        pa.array([["a", "b"], ["a"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        [[key("a"), key("b")], [key("a")]],
    ),
    "floats": ([[1.0, 2.0], [3.0]], [[1, 2], [3]]),
    "empty": (pa.array([[], []], pa.list_(pa.null())), [[], []]),
    "separated": (["7|b", "", None], [[key("7"), key("b")], [], []]),
}


@pytest.mark.parametrize(("values", "bags"), BAGS.values(), ids=BAGS)
def test_bags_of_every_type(stored, values, bags):
    batch = one(stored, values, bags=["x"])
    assert batch.jagged["x"].values.tolist() == [k for bag in bags for k in bag]
    assert batch.jagged["x"].lengths.tolist() == [len(bag) for bag in bags]


DENSE = {
    "int8": (pa.array([-100, None], pa.int8()), [-100, 0]),
    "uint64": (pa.array([2**63, 1], pa.uint64()), [2**63, 1]),
    "min": (pa.array([-(2**63), 2**63 - 1], pa.int64()), [-(2**63), 2**63]),
    "floats": (pa.array([0.5, None, math.nan, -2.5]), [0.5, 0, 0, -2.5]),
    "float16": (np.array([0.5, -2], np.float16), [0.5, -2]),
    "decimal": (pa.array([decimal.Decimal("12.50"), None]), [12.5, 0]),
    "boolean": (pa.array([True, None, False]), [1, 0, 0]),
    "text": (["1.5", None, "", "NA"], [1.5, 0, 0, 0]),
    "dictionary": (pa.array(["1.5", "2"]).dictionary_encode(), [1.5, 2]),
    "nothing": (pa.nulls(2), [0, 0]),
}


@pytest.mark.parametrize(("values", "numbers"), DENSE.values(), ids=DENSE)
def test_dense_values_of_every_type(stored, values, numbers):
    plain = one(stored, values, dense=["x"], dense_transform="none")
    assert plain.dense[:, 0].tolist() == numbers
    logs = np.sign(numbers) * np.log1p(np.abs(numbers))
    batch = one(stored, values, dense=["x"])
    np.testing.assert_array_equal(batch.dense[:, 0], logs.astype(np.float32))


BAD = {
    "null label": (
        {"y": [1, None, 0, None]},
        "column 'y': None is missing, and a label",
    ),
    "nan label": ({"y": [1, math.nan, 0, math.nan]}, "column 'y': nan is missing"),
    "text label": ({"y": ["1", "x", "0", ""]}, "column 'y': 'x' is not a number"),
    "large label": ({"y": [1, 1e39, 0, 1e300]}, "column 'y': 1e.39 is not finite in"),
    "inf": ({"d": [1, math.inf, 0, -math.inf]}, "column 'd': inf is not finite"),
    "text": ({"d": ["1", "x", None, "y"]}, "column 'd': 'x' is not a number"),
    "fraction": (
        {"c": [1, 2.5, 0, 1.5]},
        "column 'c': 2.5 is not a whole number below",
    ),
    "float id": (
        {"c": [1, 2.0**53, 0, -1e30]},
        "column 'c': .* is not a whole number below",
    ),
    "in a bag": (
        {"b": [[1], [2, 0.5], [], [math.inf]]},
        r"column 'b': \[2.0, 0.5\] is",
    ),
    "weight": ({"w": [1, -1, 0, None]}, "column 'w': -1 is negative, and a weight may"),
    "group": ({"g": [1, 2.5, 0, 0.1]}, "column 'g': 2.5 is not a whole number"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("chunk_rows", [1, 2, 100])
def test_bad_rows_are_named_or_counted(stored, change, message, chunk_rows):
    fine = {"y": [1, 0, 1, 0], "d": [1, 2, 3, 4], "c": [7, 8, 9, 10], "w": [1, 1, 1, 1]}
    fine |= {"b": [[1], [], [2], [3]], "g": [1, 2, 3, 4]}
    fine |= {"id": [7, 8, 9, 10]}
    roles = {"dense": ["d"], "categorical": ["c", "id"], "bags": ["b"], "weight": "w"}
    roles |= {"group": "g", "drop": ["g"], "label": "y", "chunk_rows": chunk_rows}
    table = pa.table(fine | change)
    with pytest.raises(ValueError, match=rf"part_0, row 2, {message}") as error:
        read(stored(table, **roles))
    assert "on_bad_line='skip'" in str(error.value)
    chunks = list(stored(table, on_bad_line="skip", **roles).chunks())
    batch = Batch.concat(chunks)
    assert (batch.size, batch.bad_lines) == (2, 2)
    assert batch.fixed[1].tolist() == [7, 9]
    assert len(chunks) == math.ceil(4 / chunk_rows)


def test_the_row_of_an_error_is_that_of_the_file(stored):
    table = {"y": [0] * 20 + [None] + [0] * 9}
    source = stored({"y": NUMBERS}, table, chunk_rows=3)
    with pytest.raises(ValueError, match="part_1, row 21, column 'y'"):
        read(source)


@pytest.mark.parametrize(
    ("values", "role", "message"),
    [
        (
            [[1], [2]],
            "dense",
            "is to be dense, so it must hold numbers, got list of int",
        ),
        ([[1], [2]], "categorical", "so it must hold keys, got list of integer"),
        ([{"a": 1}] * 2, "bags", "hold lists of keys or keys, got struct<a: int64>"),
        ([[[1]], [[2]]], "bags", "lists of keys or keys, got list of list of integer"),
        ([datetime.date(2024, 1, 1)] * 2, "dense", "must hold numbers, got time"),
        ([datetime.date(2024, 1, 1)] * 2, "categorical", "must hold keys, got time"),
    ],
)
def test_a_type_that_does_not_fit_its_role_is_refused(stored, values, role, message):
    with pytest.raises(TypeError, match=f"part_0: column 'x' .*{message}"):
        one(stored, values, **{role: ["x"]})


def test_later_files_must_be_like_the_first(stored):
    first = {"y": [0, 1], "item": ["a", "b"], "n": [1, 2], "tags": [[1], []]}
    roles = {"categorical": ["item"], "dense": ["n"]}
    for item in (["c", None], pa.array(["c", None]).dictionary_encode(), pa.nulls(2)):
        # Other orders, dtypes and dictionaries change nothing.
        second = {"tags": [[], [2]], "n": [0.5, 1], "item": item, "y": [True, False]}
        batch = read(stored(first, second, **roles))
        assert batch.size == 4
        assert batch.fixed[0, :2].tolist() == [key("a"), key("b")]
    other_keys = first | {"item": [1, 2]}
    with pytest.raises(
        TypeError, match=r"part_1: column 'item' must hold text as in th"
    ):
        read(stored(first, other_keys, **roles))
    other_bags = first | {"tags": [["a"], []]}
    with pytest.raises(
        TypeError, match="column 'tags' must hold list of integer as in"
    ):
        read(stored(first, other_bags, **roles))
    lacking = {"y": [0], "item": ["a"], "n": [1]}
    with pytest.raises(ValueError, match="part_1: columns must be those of the first"):
        read(stored(first, lacking, **roles))
    more = first | {"new": [1, 2]}
    with pytest.raises(ValueError, match=r"must be those of the first file.*'new'"):
        read(stored(first, more, **roles))


def test_columns_that_are_dropped_are_not_read(stored):
    table = pa.table({"a.b": [1, 2], "huge": ["x" * 1000, "y"], "y": [0, 1]})
    source = stored(table, drop=["huge"], categorical=["a.b"])
    ((_, data, _),) = source._pieces(0)
    assert sorted(data.schema.names) == ["a.b", "y"]
    assert read(source).fixed.tolist() == [[1, 2]]


def test_a_single_file_without_rows_is_refused(stored):
    nothing = pa.table({"y": pa.array([], pa.int8())})
    with pytest.raises(ValueError, match="there must be a row to infer columns from"):
        stored(nothing)
    batch = read(stored(nothing, {"y": [1]}))
    assert batch.labels.tolist() == [1]


def test_wrong_options_and_paths_are_refused(stored, tmp_path):
    table = {"y": [1]}
    with pytest.raises(ValueError, match="`chunk_rows` must be positive, got 0"):
        stored(table, chunk_rows=0)
    with pytest.raises(ValueError, match="`on_bad_line` must be 'error' or 'skip'"):
        stored(table, on_bad_line="warn")
    with pytest.raises(
        ValueError, match="`dense` names a column 'x' that is not there"
    ):
        stored(table, dense=["x"])
    for reader in (parquet, arrow):
        with pytest.raises(FileNotFoundError, match="no file matches"):
            reader(f"{tmp_path}/*.none")


@pytest.mark.parametrize("reader", [parquet, arrow])
@pytest.mark.parametrize(
    "data", [b"", b"click,item\n1,2\n", b"PAR1xxxx", b"ARROW1xxxxxx"]
)
def test_files_that_are_something_else_are_named(tmp_path, reader, data):
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"other: cannot be read as {reader.__name__}"):
        reader(path)


def test_a_file_cut_short_is_an_error(tmp_path):
    path = tmp_path / "cut"
    for reader, write in FORMATS.values():
        write(path, pa.table({"y": RNG.random(5000)}))
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(ValueError, match="cut: cannot be read as"):
            read(reader(path))


RNG = np.random.default_rng(0)


def test_criteo_lines_csv_and_parquet_agree_to_the_bit(tmp_path):
    names = [
        "label",
        *[f"I{i}" for i in range(1, 14)],
        *[f"C{i}" for i in range(1, 27)],
    ]
    counts = RNG.geometric(0.001, (ROWS, 13)) - 50
    ids = RNG.integers(0, 2**32, (ROWS, 26), dtype=np.uint32)
    missing = RNG.random((ROWS, 39)) < 0.2
    columns = [pa.array(NUMBERS % 2)]
    columns += [pa.array(counts[:, i], mask=missing[:, i]) for i in range(13)]
    columns += [pa.array(ids[:, i], mask=missing[:, 13 + i]) for i in range(26)]
    pq.write_table(pa.table(columns, names), tmp_path / "log.parquet")
    tsv, decimals = [], []
    for row in range(ROWS):
        numbers = np.where(missing[row, :13], "", counts[row].astype(str)).tolist()
        cells = np.where(missing[row, 13:], "", [f"{i:08x}" for i in ids[row]])
        tsv.append("\t".join([str(row % 2), *numbers, *cells.tolist()]))
        cells = np.where(missing[row, 13:], "", ids[row].astype(str))
        decimals.append(",".join([str(row % 2), *numbers, *cells.tolist()]))
    (tmp_path / "log.tsv").write_text("\n".join(tsv))
    (tmp_path / "log.csv").write_text("\n".join([",".join(names), *decimals]))
    expected = read(criteo(tmp_path / "log.tsv"))
    for source in (parquet(tmp_path / "log.parquet"), csv(tmp_path / "log.csv")):
        batch = read(source)
        assert batch.fixed_names == expected.fixed_names
        np.testing.assert_array_equal(batch.labels, expected.labels)
        np.testing.assert_array_equal(batch.dense, expected.dense)
        np.testing.assert_array_equal(batch.fixed, expected.fixed)

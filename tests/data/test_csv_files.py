"""CSV files: what a cell means, whatever the quoting, the block or the file."""

import csv as python_csv
import gzip
import io
import math
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from shardjax.data import MISSING_KEY, Batch, InMemory, Source, csv, hash_strings
from shardjax.data.delimited import Dialect, guess_delimiter
from shardjax.data.files import Block, read_blocks


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(path, **options):
    return Batch.concat(list(csv(path, **options).chunks()))


def key(text):
    return int(hash_strings([text])[0])


LOG = """click,item_id,city,price,tags
1,7,Rome,1.5,a|b
0,-3,,,
1,18446744073709551615,"Oslo, N",-2,7
"""


def check_log(batch):
    assert batch.labels.tolist() == [1, 0, 1]
    assert batch.fixed_names == ("item_id", "city")
    assert batch.fixed.tolist() == [
        [7, 2**64 - 3, 2**64 - 1],
        [key("Rome"), MISSING_KEY, key("Oslo, N")],
    ]
    logs = [[math.log(2.5)], [0], [-math.log(3)]]
    np.testing.assert_allclose(batch.dense, logs, rtol=1e-6)
    assert batch.jagged["tags"].values.tolist() == [key("a"), key("b"), 7]
    assert batch.jagged["tags"].lengths.tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("final", [True, False])
def test_a_log_in_every_form(tmp_path, name, block_bytes, end, final):
    text = LOG if final else LOG.rstrip()
    path = write(tmp_path / name, text.replace("\n", end))
    # The first block decides the kinds; a block of one row shows too little.
    check_log(read(path, block_bytes=block_bytes, dense=["price"], bags=["tags"]))


@pytest.mark.parametrize("delimiter", ["\t", ";", ","])
def test_the_delimiter_is_guessed(tmp_path, delimiter):
    text = LOG.replace(",", delimiter).replace('"Oslo; N"', '"Oslo, N"')
    text = text.replace('"Oslo\t N"', '"Oslo, N"')
    source = csv(write(tmp_path / "log.txt", text))
    assert source.dialect.delimiter == delimiter
    check_log(next(source.chunks()))


def test_any_delimiter_and_quote_can_be_given(tmp_path):
    text = LOG.replace(",", ":").replace('"Oslo: N"', "'Oslo, N'")
    check_log(read(write(tmp_path / "log.txt", text), delimiter=":", quote="'"))


def test_a_source_says_what_it_gives(tmp_path):
    source = csv(write(tmp_path / "log.csv", LOG))
    assert isinstance(source, Source)
    batch = next(source.chunks())
    assert source.feature_names == batch.feature_names == ("item_id", "city", "tags")
    assert source.n_dense == batch.n_dense == 1
    assert "city     categorical  text" in str(source.columns)


def random_table(rng, rows=60):
    """Cells that need care, some of them missing; the first is a label."""
    pieces = ["a", '"', '""', ",", "\n", "\r\n", " ", "'", "é", "1", "\t", "\r"]

    def cell():
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(0, 6)))
        return rng.choice([text, str(rng.randint(0, 99)), ""])

    return [[str(rng.randint(0, 1)), *[cell() for _ in range(3)]] for _ in range(rows)]


@pytest.mark.parametrize("quoting", [python_csv.QUOTE_MINIMAL, python_csv.QUOTE_ALL])
@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_python_quotes_is_read_back(tmp_path, quoting, block_bytes, end):
    rng = random.Random(block_bytes)
    table = random_table(rng)
    out = io.StringIO(newline="")
    writer = python_csv.writer(out, quoting=quoting, lineterminator=end)
    writer.writerows([["label", "a", "b", "c"], *table])
    path = write(tmp_path / "table.csv", out.getvalue())
    source = csv(path, block_bytes=block_bytes, categorical=["a", "b", "c"])
    batch = Batch.concat(list(source.chunks()))
    assert batch.labels.tolist() == [float(row[0]) for row in table]
    for at in range(3):
        texts = [row[at + 1] for row in table]
        hashed = hash_strings(texts)
        expected = [
            int(text) if text.isdigit() else int(hash_)
            for text, hash_ in zip(texts, hashed, strict=True)
        ]
        assert batch.fixed[at].tolist() == expected


def test_quotes_amid_a_field_are_text_and_may_be_switched_off(tmp_path):
    path = write(tmp_path / "a.csv", 'label,a\n1,5" pipe\n0,"x""y"\n')
    assert read(path).fixed[0].tolist() == [key('5" pipe'), key('x"y')]
    raw = read(path, quote=None)
    assert raw.fixed[0].tolist() == [key('5" pipe'), key('"x""y"')]


def test_bytes_that_are_no_utf_8_are_hashed_as_they_are(tmp_path):
    path = write(tmp_path / "a.csv", b"label,a\n1,caf\xe9\n0,\xff\n")
    assert read(path).fixed[0].tolist() == hash_strings([b"caf\xe9", b"\xff"]).tolist()


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_files_without_a_header(tmp_path, block_bytes):
    path = write(tmp_path / "a.csv", "1,7,x\n0,8,y\n")
    options = {"categorical": ["column_1"], "block_bytes": block_bytes}
    batch = read(path, **options)
    assert batch.labels.tolist() == [1, 0]
    assert batch.fixed_names == ("column_1", "column_2")
    named = read(path, names=["click", "item_id", "kind"], block_bytes=block_bytes)
    assert named.fixed_names == ("item_id", "kind")
    np.testing.assert_array_equal(named.fixed, batch.fixed)


def test_whether_there_is_a_header_can_be_said(tmp_path):
    path = write(tmp_path / "a.csv", "y,x\n1,2\n")
    assert not csv(path, header=False, label="column_1", on_bad_line="skip").header
    numbers = write(tmp_path / "b.csv", "2023,2024\n1,2\n")
    assert not csv(numbers).header
    assert csv(numbers, header=True, label="2023").feature_names == ("2024",)
    other = csv(path, header=True, names=["click", "z"])
    assert next(other.chunks()).size == 1
    assert other.feature_names == ("z",)
    with pytest.raises(
        ValueError, match=r"`names` must have one for each of the 2 col"
    ):
        csv(path, names=["a"])


def test_a_header_alone_has_no_rows(tmp_path):
    path = write(tmp_path / "a.csv", "click,item\n")
    assert read(path).size == 0


def test_blank_lines_before_the_header(tmp_path):
    check_log(read(write(tmp_path / "log.csv", "\n\r\n" + LOG)))


def test_empty_files_are_refused_unless_another_has_rows(tmp_path):
    empty = write(tmp_path / "a.csv", "")
    with pytest.raises(ValueError, match="there must be a row to infer columns from"):
        csv(empty)
    check_log(read([empty, write(tmp_path / "b.csv", LOG)]))


def test_columns_of_later_files_are_found_by_their_names(tmp_path):
    first = write(tmp_path / "1.csv", "click,item,price\n1,7,1\n")
    second = write(tmp_path / "2.csv", "price,click,item\n2.5,0,8\n")
    batch = read([first, second], categorical=["item"], dense=["price"])
    assert batch.fixed.tolist() == [[7, 8]]
    assert batch.labels.tolist() == [1, 0]
    third = write(tmp_path / "3.csv", "price,click\n2.5,0\n")
    with pytest.raises(ValueError, match=r"3.csv: columns must be those of the first"):
        read([first, third])
    # Without a header, or with names in its stead, the order counts.
    options = {"header": True, "names": ["a", "b", "c"], "label": "b"}
    assert read([first, second], categorical=["a"], **options).fixed[0, 0] == 1


BAD = {
    "few": ("1,2", "expected 5 fields, got 2"),
    "many": ("1,2,3,4,5,6", "expected 5 fields, got 6"),
    "label": ("x,2,3,4,5", "column 'click': 'x' is not a number"),
    "no label": (",2,3,4,5", "column 'click': '' is missing, and a label may not be"),
    "nan label": ("nan,2,3,4,5", "column 'click': 'nan' is missing"),
    "inf label": ("inf,2,3,4,5", "column 'click': 'inf' is not finite"),
    "dense": ("1,2,3,1.2.3,5", r"column 'price': '1.2.3' is not a number"),
    "inf": ("1,2,3,-inf,5", r"column 'price': '-inf' is not finite"),
    "after quote": ('1,"2"x,3,4,5', "a closing quote must end its field"),
    "return": ('1,"2"\rx,3,4,5', "a closing quote must end its field"),
    "after quote in lines": ('1,"2\n3"x,3,4,5', "a closing quote must end its field"),
}
GOOD = '1,7,"a\n""b""\nc",2.5,a|b\n'


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_a_bad_row_is_an_error_with_its_line(tmp_path, row, message, block_bytes):
    # The header, 10 rows of 3 lines each and a blank line come before.
    text = "click,item,city,price,tags\n" + GOOD * 10 + "\n" + row + "\n" + GOOD
    path = write(tmp_path / "log.csv", text)
    options: Any = {"dense": ["price"], "bags": ["tags"], "categorical": ["item"]}
    source = csv(path, block_bytes=block_bytes, **options)
    with pytest.raises(ValueError, match=rf"log.csv, line 33[:,] .*{message}") as error:
        list(source.chunks())
    assert "on_bad_line='skip'" in str(error.value)
    skipping = csv(path, block_bytes=block_bytes, on_bad_line="skip", **options)
    chunks = list(skipping.chunks())
    batch = Batch.concat(chunks)
    assert batch.size == 11
    assert batch.bad_lines == 1
    assert (batch.fixed[1] == key('a\n"b"\nc')).all()


def test_the_first_of_several_bad_rows_is_named(tmp_path):
    path = write(tmp_path / "a.csv", "y,x\n1,2\n0,x\nz,3\n1\n")
    with pytest.raises(ValueError, match="line 3, column 'x': 'x' is not a number"):
        read(path, dense=["x"])
    with pytest.raises(ValueError, match="line 4, column 'y': 'z' is not a number"):
        read(path, categorical=["x"])
    assert read(path, dense=["x"], on_bad_line="skip").bad_lines == 3


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_quote_that_is_not_closed_costs_one_line(tmp_path, block_bytes):
    path = write(tmp_path / "a.csv", 'y,x\n1,2\n0,"3\n1,4\n0,5\n')
    with pytest.raises(ValueError, match="a.csv, line 3: a quote is not closed"):
        read(path, block_bytes=block_bytes)
    batch = read(path, block_bytes=block_bytes, on_bad_line="skip", categorical=["x"])
    assert batch.fixed.tolist() == [[2, 4, 5]]
    assert batch.bad_lines == 1


def test_a_header_with_a_wrong_quote_is_an_error(tmp_path):
    path = write(tmp_path / "a.csv", '\ny,"x"z\n1,2\n')
    with pytest.raises(ValueError, match="a.csv, line 2: a closing quote must end its"):
        csv(path)


def test_weights_groups_and_thresholds(tmp_path):
    text = "rating,user_id,w,x\n4.5,7,0.5,-1\n3.5,8,2,0\n4,7,1,3\n"
    path = write(tmp_path / "a.csv", text)
    options = {"label": "rating", "weight": "w", "group": "user_id", "dense": ["x"]}
    batch = read(path, label_threshold=4, dense_transform="none", **options)
    assert batch.labels.tolist() == [1, 0, 1]
    assert batch.weights is not None
    assert batch.groups is not None
    assert batch.weights.tolist() == [0.5, 2, 1]
    assert batch.groups.tolist() == [7, 8, 7]
    assert batch.dense[:, 0].tolist() == [-1, 0, 3]
    assert batch.fixed_names == ("user_id",)
    assert read(path, **options).labels.tolist() == [4.5, 3.5, 4]


@pytest.mark.parametrize(
    ("weight", "message"),
    [("", "is missing"), ("-1", "is negative"), ("x", "is not a")],
)
def test_a_wrong_weight_is_a_bad_row(tmp_path, weight, message):
    path = write(tmp_path / "a.csv", f"y,w\n1,1\n0,{weight}\n")
    with pytest.raises(ValueError, match=f"line 3, column 'w': .* {message}"):
        read(path, weight="w")
    assert read(path, weight="w", on_bad_line="skip").size == 1


def test_ids_wider_than_a_float_keep_their_last_digit(tmp_path):
    ids = [2**53, 2**53 + 1, 2**63 + 1, 2**64 - 1]
    text = "y,url_hash\n" + "".join(f"1,{i}\n" for i in ids) + "0,1.2e+19\n"
    batch = read(write(tmp_path / "a.csv", text))
    assert batch.fixed[0].tolist() == [*ids, key("1.2e+19")]


def test_true_and_false(tmp_path):
    path = write(tmp_path / "a.csv", "y,new,old\ntrue,True,false\nFALSE,False,true\n")
    source = csv(path, dense=["old"])
    batch = next(source.chunks())
    assert batch.labels.tolist() == [1, 0]
    assert batch.dense[:, 0].tolist() == [0, np.float32(math.log(2))]
    assert source.columns.names("categorical") == ("new",)


def test_any_column_can_be_a_bag_or_a_key(tmp_path):
    path = write(tmp_path / "a.csv", "y,a,b\n1,3 4,x|y\n0,5,\n")
    batch = read(path, bags=["a"], categorical=["b"], bag_separator=" ")
    assert batch.jagged["a"].values.tolist() == [3, 4, 5]
    assert batch.fixed[0].tolist() == [key("x|y"), MISSING_KEY]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pass_can_start_at_any_chunk(tmp_path, threads):
    rows = "".join(f"{i % 2},{i},t{i}\n" for i in range(200))
    paths = [write(tmp_path / f"{i}.csv", "y,a,b\n" + rows) for i in range(2)]
    source = csv(paths, block_bytes=300, threads=threads, categorical=["a"])
    chunks = list(source.chunks())
    assert len(chunks) > 10
    for start in (0, 1, len(chunks) - 1, len(chunks) + 3):
        again = list(source.chunks(start))
        assert len(again) == max(0, len(chunks) - start)
        for ours, theirs in zip(chunks[start:], again, strict=True):
            np.testing.assert_array_equal(ours.fixed, theirs.fixed)
    kept = Batch.concat(list(InMemory(source).chunks()))
    assert kept.fixed[0].tolist() == list(range(200)) * 2


def test_wrong_options_are_refused(tmp_path):
    path = write(tmp_path / "log.csv", LOG)
    wrong: Any = {"on_bad_line": "warn"}
    with pytest.raises(FileNotFoundError, match="no such file: .*none.csv"):
        csv(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="`on_bad_line` must be 'error' or 'skip'"):
        csv(path, **wrong)
    with pytest.raises(ValueError, match="`delimiter` must be one ASCII character"):
        csv(path, delimiter="||")
    with pytest.raises(ValueError, match="`quote` must be one ASCII character"):
        csv(path, quote="")
    with pytest.raises(ValueError, match="`quote` and `delimiter` must differ"):
        csv(path, delimiter='"')
    wrong = {"labels": "click"}
    with pytest.raises(
        TypeError, match="there is no option 'labels' for columns, only"
    ):
        csv(path, **wrong)


def test_where_rows_end_and_rows_agree():
    """The search for the end of the last row and the split see the same rows."""
    rng = random.Random(3)
    dialect = Dialect(",")
    for _ in range(300):
        text = "".join(rng.choice('a",\n\r') for _ in range(rng.randint(1, 30))) + "\n"
        data = np.frombuffer(text.encode() + bytes(32), np.uint8).copy()
        size = len(text)
        end = dialect.last_row_end(data[:size])
        if end == 0:
            continue  # A quote is not closed: nothing before it is a whole row.
        lines = text.count("\n")
        block = Block("text", data.copy(), size, 1, lines)
        whole = dialect.split(block, 0, end, 2, skip=True)
        rest = text[end:]
        assert '"' in rest or not rest
        # No row goes past the end: cut there, all rows are as before.
        cut = Block("text", data.copy(), end, 1, lines)
        again = dialect.split(cut, 0, end, 2, skip=True)
        np.testing.assert_array_equal(whole.starts, again.starts)
        assert whole.bad_rows == again.bad_rows


def test_lines_are_counted_after_quotes_are_undone(tmp_path):
    path = write(tmp_path / "a.csv", 'y,x\n1,"""\n\n"""""\n1,"a""\n"\nz,\n')
    (block,) = read_blocks(str(path), 1 << 20, Dialect(",").last_row_end)
    assert guess_delimiter(block) == ","
    with pytest.raises(ValueError, match="a.csv, line 7, column 'y'"):
        read(path)


def test_memory_is_bounded_by_the_block(tmp_path):
    path = write(tmp_path / "a.csv", "y,a,b\n" + "1,123456,some text\n" * 200_000)
    source = csv(path, block_bytes=1 << 16, categorical=["a"], drop=["b"])
    next(source.chunks())
    tracemalloc.start()
    rows = sum(chunk.size for chunk in source.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 200_000
    assert peak < 1 << 20


def test_a_header_with_a_name_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", "click,city,city\n1,Rome,Oslo\n")
    message = r"a\.csv, line 1: column names must differ, got 'city' twice .* 'click'"
    with pytest.raises(ValueError, match=message):
        csv(path)
    path = write(tmp_path / "b.csv", "won,city,city\n1,Rome,Oslo\n")
    with pytest.raises(ValueError, match="'city' twice"):
        csv(path, label="won")


def test_repeated_cells_of_a_file_without_names_are_data(tmp_path):
    path = write(tmp_path / "a.csv", "1,x,x\n0,y,x\n")
    assert read(path).fixed.tolist() == [[key("x"), key("y")], [key("x")] * 2]


def test_a_bag_separator_must_not_be_the_delimiter(tmp_path):
    path = write(tmp_path / "a.csv", "click|tags\n1|a\n")
    with pytest.raises(ValueError, match="`bag_separator` and `delimiter` must differ"):
        csv(path, delimiter="|")
    assert csv(path, delimiter="|", bag_separator=";").feature_names == ("tags",)

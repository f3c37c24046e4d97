"""Words of lines, against `str.split`."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.data.files import Block
from shardjax.data.text import Cells
from shardjax.data.tokens import (
    Names,
    group_bags,
    parse_unsigned,
    renumber,
    split_block,
)

lines = st.lists(st.text("a0: \t\r#", max_size=12), max_size=8)


def make_block(lines):
    data = "".join(line + "\n" for line in lines).encode()
    array = np.frombuffer(data + bytes(32), np.uint8).copy()
    return Block("a.txt", array, len(data), 1, len(lines))


@given(lines, st.booleans())
def test_words_are_those_of_split(lines, comments):
    tokens = split_block(make_block(lines), comments)
    expected = [line.split("#")[0] if comments else line for line in lines]
    expected = [line.split() for line in expected]
    words = [word for line in expected for word in line]
    cells = tokens.cells()
    assert [cells[i] for i in range(len(cells))] == words
    assert tokens.n_lines == sum(map(bool, expected))
    numbers = [i for i, line in enumerate(filter(None, expected)) for _ in line]
    assert tokens.lines.tolist() == numbers
    assert tokens.firsts.tolist() == [numbers.index(i) for i in range(tokens.n_lines)]
    assert tokens.n_colons.tolist() == [word.count(":") for word in words]
    everything = np.arange(len(words))
    parts = [tokens.parts(part, everything) for part in range(3)]
    for i, word in enumerate(words):
        padded = [*word.split(":", 2), "", ""][:3]
        for part in range(min(word.count(":"), 2) + 1):
            assert parts[part][i] == padded[part]
    places = [i for i, line in enumerate(expected, 1) if line]
    assert [tokens.place(i) for i in range(tokens.n_lines)] == [
        f"a.txt, line {i}" for i in places
    ]


@given(st.lists(st.integers(-5, 2**64 + 5) | st.text("09x", max_size=22)))
def test_unsigned_integers_are_those_of_int(texts):
    texts = [str(text) for text in texts]
    keys, wrong = parse_unsigned(Cells.of(texts))
    for text, key, bad in zip(texts, keys.tolist(), wrong.tolist(), strict=True):
        good = text.isdecimal() and int(text) < 2**64
        assert (bad, key) == (not good, int(text) if good else 0)


@given(st.lists(st.text(max_size=5), unique=True), st.lists(st.text(max_size=5)))
def test_names_are_found(names, texts):
    texts += names
    expected = [names.index(text) if text in names else -1 for text in texts]
    assert Names(names).find(Cells.of(texts)).tolist() == expected


@pytest.mark.parametrize("n_columns", [3, 40_000])
def test_bags_keep_the_order_of_keys(n_columns):
    rng = np.random.default_rng(0)
    rows = np.sort(rng.integers(0, 7, 50))
    columns = rng.integers(0, 3, 50)
    keys = rng.integers(0, 2**64, 50, dtype=np.uint64)
    weights = rng.random(50)
    bags = group_bags(
        [str(i) for i in range(n_columns)], columns, rows, 7, keys, weights
    )
    for column in range(n_columns if n_columns < 100 else 4):
        mine = columns == column
        bag = bags[str(column)]
        np.testing.assert_array_equal(bag.values, keys[mine])
        np.testing.assert_array_equal(bag.weights, weights[mine].astype(np.float32))
        np.testing.assert_array_equal(bag.lengths, np.bincount(rows[mine], minlength=7))


def test_all_lines_are_rows_if_all_are_good():
    lines = np.array([0, 0, 2])
    assert renumber(lines, 3, None) == (lines, 3)
    rows, n_rows = renumber(lines, 3, np.array([2]))
    assert (rows.tolist(), n_rows) == ([-1, -1, 0], 1)

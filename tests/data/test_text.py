"""Cells of text: which are integers, numbers read as Python reads them, bags."""

import random

import numpy as np
import pytest

from shardjax.data import MISSING_KEY, hash_strings
from shardjax.data.text import (
    Cells,
    are_integers,
    check_separator,
    parse_bags,
    parse_keys,
    parse_numbers,
)

INTEGERS = {
    "0": 0,
    "7": 7,
    "-1": 2**64 - 1,
    "42": 42,
    str(2**53 + 1): 2**53 + 1,
    str(2**63 - 1): 2**63 - 1,
    str(2**63): 2**63,
    str(2**64 - 1): 2**64 - 1,
    "18446744073709551609": 18446744073709551609,
    str(-(2**63)): 2**63,
    "9999999999999999999": 9999999999999999999,
}
TEXTS = [
    "a",
    "042",
    "00",
    "-0",
    "+1",
    "-",
    "--1",
    "1-",
    "1.0",
    "1e3",
    " 1",
    "1 ",
    "1_000",
    str(2**64),
    "18446744073709551620",
    "99999999999999999999",
    "100000000000000000000",
    str(-(2**63) - 1),
    "1.2e+19",
    "日本",
    "x" * 99,
]


def test_usual_integers_are_their_own_keys_to_the_edges_of_64_bits():
    cells = Cells.of(INTEGERS)
    assert parse_keys(cells).tolist() == list(INTEGERS.values())
    assert are_integers(cells).all()


def test_all_other_text_is_hashed():
    cells = Cells.of(TEXTS)
    assert parse_keys(cells).tolist() == hash_strings(TEXTS).tolist()
    assert not are_integers(cells).any()


def test_integers_can_be_hashed_too():
    texts = [*INTEGERS, *TEXTS]
    keys = parse_keys(Cells.of(texts), integers=False)
    assert keys.tolist() == hash_strings(texts).tolist()


def test_an_empty_cell_is_the_missing_key():
    assert parse_keys(Cells.of(["", "1"])).tolist() == [MISSING_KEY, 1]
    assert not are_integers(Cells.of([""]))[0]
    assert len(parse_keys(Cells.of([]))) == 0


def test_cells_may_lie_anywhere_in_the_data():
    data = np.frombuffer(b"12,345;67", np.uint8)
    cells = Cells(data, np.array([3, 0, 8, 5]), np.array([6, 2, 9, 5]))
    assert parse_keys(cells).tolist() == [345, 12, 7, MISSING_KEY]
    assert parse_numbers(cells)[0][:3].tolist() == [345, 12, 7]
    assert [cells[i] for i in range(4)] == ["345", "12", "7", ""]
    assert cells.to_arrow().to_pylist() == [b"345", b"12", b"7", None]


@pytest.mark.parametrize("integers", [True, False])
def test_bags_split_at_the_separator(integers):
    texts = ["7|9|11", "", "5", "|", "a||b|", "|x", "-1|a b"]
    parts = [[part for part in text.split("|") if part] for text in texts]
    values, lengths = parse_bags(Cells.of(texts), "|", integers)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == [len(bag) for bag in parts]
    flat = Cells.of([part for bag in parts for part in bag])
    assert values.tolist() == parse_keys(flat, integers).tolist()


def test_a_separator_is_one_ascii_character_within_a_line():
    check_separator(" ", "delimiter")
    for separator in ["", "||", "é", "\n", "\r", "\0"]:
        with pytest.raises(ValueError, match="`delimiter` must be one ASCII character"):
            check_separator(separator, "delimiter")
    with pytest.raises(ValueError, match="`separator` must be one ASCII"):
        parse_bags(Cells.of(["a"]), "")


def numbers(texts):
    values, wrong = parse_numbers(Cells.of(texts))
    assert not wrong.any(), [t for t, w in zip(texts, wrong, strict=True) if w]
    return values


def test_numbers_of_15_digits_are_those_python_reads():
    rng = random.Random(0)
    texts = []
    for _ in range(3000):
        digits = str(rng.randrange(10 ** rng.randint(1, 15)))
        dot = rng.randint(0, len(digits))
        text = rng.choice(["", "-", "+"]) + digits[:dot] + "." + digits[dot:]
        texts.append(text + rng.choice(["", "", f"e{rng.randint(-30, 30)}", "E+2"]))
    texts += ["0", "-0.0", "3", ".5", "5.", "1e-400", "1e22", "1e23", "123e-22"]
    np.testing.assert_array_equal(numbers(texts), [float(text) for text in texts])


def test_longer_numbers_are_right_to_the_last_bit_but_one():
    rng = random.Random(1)
    texts = [repr(rng.uniform(-1, 1) * 10 ** rng.randint(-12, 12)) for _ in range(2000)]
    texts += ["0.1234567890123456789012345", "9" * 30, "1" + "0" * 300, "0" * 50 + "1"]
    expected = np.array([float(text) for text in texts])
    assert (np.abs(numbers(texts) - expected) <= np.spacing(np.abs(expected))).all()


def test_words_spaces_and_empty_cells():
    texts = ["", " ", "NA", "NaN", "nan", "null", "None", "\\N", " 1.5\t", "true"]
    texts += ["False", "TRUE", "inf", "-Infinity"]
    nan = np.nan
    np.testing.assert_array_equal(
        numbers(texts), [nan] * 8 + [1.5, 1, 0, 1, np.inf, -np.inf]
    )


@pytest.mark.parametrize(
    "text",
    ["x", "1x", "1.2.3", "1e", "e5", "+", "-", ".", "1 2", "0x1f", "1_000", "--1", "٣"]
    + ["1,5", "nano", "1e5.0", "infinite", "trueish", "1e99999x", "1\0", "\xff"],
)
def test_what_is_no_number_is_wrong(text):
    values, wrong = parse_numbers(Cells.of(["1", text, "2"]))
    assert wrong.tolist() == [False, True, False]
    np.testing.assert_array_equal(values, [1, np.nan, 2])

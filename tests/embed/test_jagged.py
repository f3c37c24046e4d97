import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.embed import Jagged, as_keys

WIDE = (0, 1, 2**31, 2**32 + 5, 2**53 + 1, 2**63 - 1)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_signed_keys_keep_their_bits(dtype):
    limits = np.iinfo(dtype)
    keys = as_keys(np.array([limits.min, -1, 0, limits.max], dtype))
    assert keys.dtype == np.uint64
    assert keys.tolist() == [2**64 + limits.min, 2**64 - 1, 0, limits.max]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_unsigned_keys_are_widened(dtype):
    keys = as_keys(np.array([0, np.iinfo(dtype).max], dtype))
    assert keys.dtype == np.uint64
    assert keys.tolist() == [0, np.iinfo(dtype).max]


def test_wide_keys_do_not_alias():
    assert as_keys(np.array(WIDE)).tolist() == list(WIDE)
    wide = [*WIDE, 2**64 - 1]
    assert as_keys(np.array(wide, np.uint64)).tolist() == wide


@pytest.mark.parametrize("values", [[1.0], [True], ["a"], [b"a"], [1j], [2**64]])
def test_keys_that_are_not_integers_are_refused(values):
    with pytest.raises(TypeError, match="keys of `item` must be integers, got dtype"):
        as_keys(np.array(values), "item")
    with pytest.raises(TypeError, match="keys of `values` must be integers"):
        Jagged(np.array(values), np.array([1]))


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=5)))
def test_bags_are_where_the_offsets_say(bags):
    flat = [key for bag in bags for key in bag]
    jagged = Jagged(
        np.array(flat, np.uint64), np.array([len(bag) for bag in bags], np.int64)
    )
    assert jagged.lengths.dtype == np.int32
    cut = [
        jagged.values[start:end].tolist()
        for start, end in zip(jagged.offsets[:-1], jagged.offsets[1:], strict=True)
    ]
    assert cut == bags


def test_weights_become_float32():
    jagged = Jagged(np.array([1, 2]), np.array([2]), np.array([1, 2], np.float64))
    assert jagged.weights is not None
    assert jagged.weights.dtype == np.float32


@pytest.mark.parametrize(
    ("values", "lengths", "weights", "error", "message"),
    [
        ([1], [1.0], None, TypeError, "`lengths` must be integers, got dtype float64"),
        ([[1]], [1], None, ValueError, r"one dim each, got shapes \(1, 1\) and \(1,\)"),
        ([1], [[1]], None, ValueError, r"one dim each, got shapes \(1,\) and \(1, 1\)"),
        ([1, 2], [3, -1], None, ValueError, "not be negative, got -1 for example 1"),
        (
            [1, 2],
            [1],
            None,
            ValueError,
            "add up to the number of `values`, got 1 and 2",
        ),
        ([1], [2], None, ValueError, "add up to the number of `values`, got 2 and 1"),
        ([1, 2], [2], [1.0], ValueError, r"one entry per value, got shapes \(1,\) and"),
    ],
)
def test_parts_that_do_not_fit_are_refused(values, lengths, weights, error, message):
    with pytest.raises(error, match=message):
        Jagged(np.array(values), np.array(lengths), weights)


def test_lengths_are_summed_without_wrapping():
    with pytest.raises(ValueError, match=f"got {2**32} and 0"):
        Jagged(np.array([], np.int64), np.full(2, 2**31, np.int64))

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.embed.layout import pack, rung


@given(st.integers(0, 2**40), st.integers(1, 1000))
def test_rungs_hold_what_they_must(count, smallest):
    size = rung(count, smallest)
    assert size >= max(count, smallest)
    assert size <= max(smallest, count * 9 / 8)
    assert rung(size, smallest) == size


def test_an_octave_has_eight_rungs():
    sizes = {rung(n) for n in range(1025, 2049)}
    assert sizes == set(range(1152, 2049, 128))


def test_arrays_survive_the_transfer():
    arrays = {
        "slots": np.arange(12, dtype=np.int32).reshape(2, 2, 3) - 5,
        "empty": np.zeros((2, 0), np.int32),
        "weights": np.array([[0.1, np.nan], [-np.inf, 3e-42]], np.float32),
        "scalar": np.array([7, 8], np.int32),
    }
    packed, layout = pack(2, 4, (), arrays)
    assert packed.shape == (2, layout.words)
    assert hash(layout) == hash(pack(2, 4, (), arrays)[1])
    for device in range(2):
        got = jax.jit(layout.unpack)(packed[device])
        for name, array in arrays.items():
            assert got[name].dtype == array.dtype
            words = np.asarray(got[name]).view(np.int32)
            np.testing.assert_array_equal(words, array[device].view(np.int32))


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (
            np.zeros((2, 3), np.int64),
            TypeError,
            "'x' of a step must be int32 or float32",
        ),
        (
            np.zeros((2, 3), np.float16),
            TypeError,
            "must be int32 or float32, got float16",
        ),
        (
            np.zeros((3, 2), np.int32),
            ValueError,
            r"must have 2 \(devices\) as its first",
        ),
        (np.zeros((), np.int32), ValueError, r"as its first dim, got shape \(\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(array, error, message):
    with pytest.raises(error, match=message):
        pack(2, 4, (), {"x": array})

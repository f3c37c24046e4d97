"""Batch: what it accepts, and rows taken, sliced and joined."""

import numpy as np
import pytest

from shardjax.data import Batch
from shardjax.embed.jagged import Jagged


def make_batch(size=5, *, seed=0, weighted=True, bad_lines=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, size)
    total = int(lengths.sum())
    return Batch(
        labels=rng.integers(0, 2, size),
        dense=rng.normal(size=(size, 3)),
        fixed=rng.integers(0, 2**64, (2, size), dtype=np.uint64),
        fixed_names=("a", "b"),
        jagged={
            "bag": Jagged(
                rng.integers(0, 2**64, total, dtype=np.uint64),
                lengths,
                rng.random(total) if weighted else None,
            )
        },
        weights=rng.random(size),
        groups=rng.integers(0, 9, size),
        bad_lines=bad_lines,
    )


def rows_of(batch):
    """The batch as a list of plain Python rows."""
    rows = []
    for i in range(batch.size):
        bags = {}
        for name, bag in batch.jagged.items():
            span = slice(bag.offsets[i], bag.offsets[i + 1])
            weights = None if bag.weights is None else bag.weights[span].tolist()
            bags[name] = (bag.values[span].tolist(), weights)
        rows.append(
            (
                batch.labels[i],
                batch.dense[i].tolist(),
                batch.fixed[:, i].tolist(),
                bags,
                None if batch.weights is None else batch.weights[i],
                None if batch.groups is None else batch.groups[i],
            )
        )
    return rows


def minimal(**changes):
    arrays = {
        "labels": np.zeros(3),
        "dense": np.zeros((3, 2)),
        "fixed": np.zeros((1, 3), np.int64),
        "fixed_names": ("a",),
    }
    return Batch(**(arrays | changes))


def test_arrays_are_coerced_to_the_documented_dtypes():
    batch = make_batch()
    assert batch.weights is not None
    assert batch.groups is not None
    assert batch.labels.dtype == batch.dense.dtype == batch.weights.dtype == np.float32
    assert batch.fixed.dtype == batch.groups.dtype == np.uint64
    assert (batch.size, batch.n_dense) == (5, 3)
    assert batch.feature_names == ("a", "b", "bag")
    strided = minimal(fixed=np.zeros((6, 1), np.int32)[::2].T)
    assert strided.fixed.flags.c_contiguous


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_narrow_and_negative_keys_widen_by_two_complement(dtype):
    top = np.iinfo(dtype).max
    batch = minimal(fixed=np.array([[0, top, -1 % (top + 1)]]).astype(dtype))
    assert batch.fixed[0].tolist() == [0, top, top]
    if np.iinfo(dtype).min < 0:
        assert minimal(fixed=np.full((1, 3), -1, dtype)).fixed[0, 0] == 2**64 - 1


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"labels": ["x"] * 3}, TypeError, "`labels` must be numbers, got dtype <U1"),
        ({"labels": np.zeros((3, 1))}, ValueError, "`labels` must have one dim"),
        ({"dense": np.zeros(3)}, ValueError, r"`dense` must have shape \[3, n_dense\]"),
        ({"dense": np.zeros((2, 2))}, ValueError, r"as there are 3 labels, got \(2, 2"),
        ({"fixed": np.zeros((1, 3))}, TypeError, "keys of `fixed` must be integers"),
        (
            {"fixed": np.zeros((3, 1), int)},
            ValueError,
            r"`fixed` must have shape \[1, 3",
        ),
        ({"fixed_names": ("a", "b")}, ValueError, "2 `fixed_names` and 3 labels"),
        (
            {"fixed": np.zeros((2, 3), int), "fixed_names": ("a", "a")},
            ValueError,
            "must be unique in a batch, got 'a' twice",
        ),
        (
            {"jagged": {"a": Jagged(np.zeros(0, int), np.zeros(3, int))}},
            ValueError,
            "got 'a' twice",
        ),
        ({"jagged": {"b": [1]}}, TypeError, "'b' must be a Jagged, got list"),
        (
            {"jagged": {"b": Jagged(np.zeros(0, int), np.zeros(2, int))}},
            ValueError,
            "'b' must have 3 lengths as there are 3 labels, got 2",
        ),
        ({"weights": np.zeros(2)}, ValueError, r"`weights` must have shape \[3\]"),
        ({"groups": np.zeros(4, int)}, ValueError, r"`groups` must have shape \[3\]"),
        ({"groups": np.zeros(3)}, TypeError, "keys of `groups` must be integers"),
        ({"bad_lines": 1.5}, TypeError, "integer"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, error, match):
    with pytest.raises(error, match=match):
        minimal(**changes)


def test_take_copies_rows_in_order_with_repeats():
    batch = make_batch(7)
    rows = rows_of(batch)
    index = [6, 0, 0, 3, -1]
    assert rows_of(batch.take(index)) == [rows[i] for i in index]
    assert rows_of(batch.take([])) == []
    taken = batch.take(np.arange(7)[::-1])
    assert taken.fixed.flags.c_contiguous
    taken.labels[:] = 9
    assert rows_of(batch) == rows


def test_take_refuses_masks_and_rows_out_of_range():
    batch = make_batch(3)
    with pytest.raises(TypeError, match="`index` must be row numbers.*flatnonzero"):
        batch.take(np.array([True, False, True]))
    with pytest.raises(TypeError, match="got dtype int64 of shape"):
        batch.take(np.zeros((1, 2), np.int64))
    with pytest.raises(IndexError, match="out of bounds"):
        batch.take([3])


@pytest.mark.parametrize("bounds", [(0, 7), (2, 5), (0, 0), (7, 7), (5, 2), (3, 99)])
def test_slice_is_a_python_slice_of_the_rows(bounds):
    batch = make_batch(7)
    assert rows_of(batch.slice(*bounds)) == rows_of(batch)[slice(*bounds)]


def test_cut_and_joined_again_is_the_same_with_its_count_of_bad_lines():
    batch = make_batch(7, bad_lines=4)
    parts = [batch.slice(0, 3), batch.slice(3, 3), batch.slice(3, 7)]
    assert [p.bad_lines for p in parts] == [4, 0, 0]
    joined = Batch.concat(parts)
    assert rows_of(joined) == rows_of(batch)
    assert joined.bad_lines == 4
    assert batch.take([0, 1]).bad_lines == 0


def test_batches_without_rows_or_features_work():
    empty = Batch(
        np.array([]), np.zeros((0, 0)), np.zeros((0, 0), np.uint64), bad_lines=3
    )
    assert empty.size == 0
    assert empty.feature_names == ()
    assert Batch.concat([empty, empty]).bad_lines == 6
    assert empty.slice(0, 5).bad_lines == 3
    assert rows_of(empty.take([])) == []


def test_concat_refuses_nothing_and_other_layouts():
    batch = make_batch()
    with pytest.raises(ValueError, match="at least one batch, got none"):
        Batch.concat([])
    with pytest.raises(
        ValueError, match=r"same fixed features, got .*'b'.* in batch 1"
    ):
        Batch.concat([minimal(), make_batch()])
    with pytest.raises(ValueError, match="same number of dense features, got 2 .*1 in"):
        Batch.concat([minimal(), minimal(dense=np.zeros((3, 1)))])
    with pytest.raises(ValueError, match="same optional arrays"):
        Batch.concat([minimal(), minimal(weights=np.ones(3))])
    with pytest.raises(ValueError, match="same weighted jagged features"):
        Batch.concat([batch, make_batch(weighted=False)])

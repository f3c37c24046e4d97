import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardjax.embed.in_graph import first_places, lookup, pool
from shardjax.embed.lookup import lookup as reference
from tests.embed.reference import random_bags

ROWS, DIM = 300, 3
TABLE = np.arange(1, ROWS * DIM + 1, dtype=np.float32).reshape(ROWS, DIM)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([0, 299, 300, -1, 2**32 + 5, 2**63 - 1]),
        np.array([0, 299, 300, 2**64 - 1], np.uint64),
        np.array([-128, 127, -1], np.int8),
        np.array([[255], [0]], np.uint8),
        np.array([300, 2**32 - 1, 7], np.uint32),
        jnp.array([255, 0], jnp.uint8),
        jnp.array([300, 2**32 - 1, 7], jnp.uint32),
        jnp.array([-1, -300, 299], jnp.int16),
    ],
    ids=str,
)
def test_ids_of_any_integers(ids):
    rows = np.asarray(lookup(jnp.asarray(TABLE), ids))
    assert rows.shape == (*ids.shape, DIM)
    for i, row in zip(np.ravel(ids).tolist(), rows.reshape(-1, DIM), strict=True):
        wanted = TABLE[i] if 0 <= i < ROWS else np.full(DIM, np.nan)
        np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize("padding_id", [-1, 7, 300, 2**40])
def test_padding_reads_zeros_and_bad_ids_do_if_asked(padding_id):
    ids = np.array([padding_id, 5, 1000])
    for bad, wanted in (("nan", np.nan), ("zero", 0)):
        rows = lookup(jnp.asarray(TABLE), ids, padding_id=padding_id, bad_ids=bad)
        np.testing.assert_array_equal(rows, [[0] * DIM, TABLE[5], [wanted] * DIM])


def test_unsigned_ids_are_never_a_negative_padding():
    ids = jnp.array([2**32 - 1], jnp.uint32)
    assert jnp.isnan(lookup(jnp.asarray(TABLE), ids, padding_id=-1)).all()


@pytest.mark.parametrize("ids", [np.ones(2), np.array([True]), [1, 2]], ids=str)
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(ValueError, match="array of integers, got (float64|bool|list)"):
        lookup(jnp.asarray(TABLE), ids)


def test_other_words_for_bad_ids_are_refused():
    with pytest.raises(ValueError, match="`bad_ids` must be one of .*got 'clip'"):
        lookup(jnp.asarray(TABLE), np.arange(2), bad_ids="clip")


def test_one_place_of_each_id_is_found():
    rng = np.random.default_rng(0)
    places = jnp.asarray(rng.integers(-(2**31), 2**31 - 1, 50, dtype=np.int32))
    find = jax.jit(first_places)
    for high in (1, 3, 50):
        ids = rng.integers(-2, high, 64).astype(np.int32)
        first, places = find(places, ids)
        found = np.asarray(ids)[np.asarray(first)]
        assert sorted(found) == sorted(set(ids[ids >= 0].tolist()))
        real = ids >= 0
        np.testing.assert_array_equal(ids[np.asarray(places)[ids[real]]], ids[real])
        assert np.asarray(first)[np.asarray(places)[ids[real]]].all()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_are_pooled_as_the_reference_does(combiner):
    bags = random_bags(np.random.default_rng(0), 14, np.arange(ROWS), weighted=True)
    length = int(bags.lengths.max())
    ids = np.full((14, length), -1)
    weights = np.full((14, length), 9, np.float32)  # of padding: to be ignored
    mask = np.arange(length) < bags.lengths[:, None]
    ids[mask], weights[mask] = bags.values, bags.weights
    for given in (None, weights):
        rows = lookup(jnp.asarray(TABLE), ids, padding_id=-1)
        got = pool(rows, ids, given, combiner, -1)
        own = None if given is None else bags.weights
        wanted = reference(
            jnp.asarray(TABLE), bags.values.astype(int), bags.lengths, own, combiner
        )
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_weights_of_another_shape_are_refused():
    ids = np.zeros((2, 3), int)
    with pytest.raises(ValueError, match=r"shape \(2, 3\), got \(2,\)"):
        pool(lookup(jnp.asarray(TABLE), ids), ids, np.ones(2), "sum", None)

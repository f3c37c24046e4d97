import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardjax.embed import index, join_keys, split_keys, translate
from shardjax.embed.key_words import mix64, owner_of
from tests.embed.reference import wide_keys

EDGES = [1, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**48 - 1, 2**63]


@pytest.fixture(scope="module")
def keys() -> np.ndarray:
    return np.concatenate([wide_keys(500), np.array(EDGES, np.uint64)])


def test_words_are_those_of_the_key(keys):
    hi, lo = split_keys(keys)
    assert hi.dtype == lo.dtype == np.uint32
    assert [
        (int(h) << 32) + int(w) for h, w in zip(hi, lo, strict=True)
    ] == keys.tolist()
    np.testing.assert_array_equal(join_keys(jnp.asarray(hi), jnp.asarray(lo)), keys)


def test_signed_keys_keep_their_bits():
    hi, lo = split_keys(np.array([-1, 5], np.int8))
    np.testing.assert_array_equal(
        join_keys(hi, lo), np.array([2**64 - 1, 5], np.uint64)
    )


def test_keys_are_integers():
    with pytest.raises(
        TypeError, match="keys of `keys` must be integers, got dtype float"
    ):
        split_keys(np.zeros(3))


def test_hash_and_owner_are_those_of_the_host(keys):
    high, low = jax.jit(mix64)(*split_keys(keys))
    expected = [int(index.mix64(key)) for key in keys]
    assert join_keys(high, low).tolist() == expected
    for devices in (1, 3, 8, 65536):
        owners = owner_of(high, devices)
        assert owners.dtype == jnp.int32
        assert owners.tolist() == [
            int(translate.owner_of(key, -1, devices)) for key in keys
        ]

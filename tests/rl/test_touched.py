"""Copying touched rows into another table: what Paddle's fleet does, at one step."""

import numpy as np
import optax
import pytest

from shardjax import rl, train
from shardjax.data import Batch
from shardjax.embed import EmbeddingCollection, FeatureSpec, TableSpec
from shardjax.mesh import make_mesh
from shardjax.network import Network
from shardjax.state import init_state


def tables(dim=2, mesh="1x1"):
    item = TableSpec("item", dim, optax.sgd(1.0))
    return EmbeddingCollection({"item": FeatureSpec(item)}, mesh=make_mesh(mesh))


def network():
    def apply(params, state, dense, embeddings, *, train):
        return embeddings["item"].sum(1) + params["bias"], state

    return Network(apply, {"bias": np.zeros((), np.float32)}, {})


def test_the_other_table_is_what_this_one_was_at_the_last_copy():
    """Every touched key, of keys beyond 32 bits too; what was not copied since stays."""
    source, target = tables(mesh="4x2"), tables()
    tx = optax.sgd(0.1)
    state, target_state = init_state(network(), tx, source), target.init()
    step = train.make_train_step(network(), tx, source)
    copy, rng, at_copy = rl.TouchedCopy("item", every=3), np.random.default_rng(0), {}
    keys = np.array([*range(6), 2**40, 2**64 - 1], np.uint64)
    for number in range(7):
        ids = rng.choice(keys, 8)
        batch = Batch(np.ones(8), np.zeros((8, 0)), ids[None], ("item",))
        state, _ = step(state, train.prepare(source, batch, train=True))
        copy.add(ids)
        assert copy.due == (number % 3 == 2)
        if copy.due:
            target_state = copy.move(source, state.tables, target, target_state)
            read = source.lookup_rows(state.tables, "item", keys)
            at_copy = {
                k: r
                for k, r, f in zip(keys, read["rows"], read["found"], strict=True)
                if f
            }
            assert copy.batches == 0
        read = target.lookup_rows(target_state, "item", keys)
        for key, row, found in zip(keys, read["rows"], read["found"], strict=True):
            assert found == (key in at_copy)
            if found:
                np.testing.assert_array_equal(row, at_copy[key])
    assert len(at_copy) == len(keys)
    assert copy.skipped == 0


def test_a_copy_of_nothing_changes_nothing():
    source, target = tables(), tables()
    copy = rl.TouchedCopy("item")
    state = copy.move(source, source.init(), target, target.init())
    assert len(target.keys("item")) == 0
    assert copy.copied == copy.skipped == 0
    copy.add([5])  # a key that never got a row
    copy.move(source, source.init(), target, state)
    assert (copy.copied, copy.skipped) == (0, 1)


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(TypeError, match="`every` must be a number of batches, got 2.0"):
        rl.TouchedCopy("item", 2.0)
    with pytest.raises(ValueError, match="at least 1 batch, got 0"):
        rl.TouchedCopy("item", 0)
    copy = rl.TouchedCopy("item")
    with pytest.raises(TypeError, match="keys of table 'item' must be integers"):
        copy.add([0.5])
    source, wide = tables(), tables(dim=3)
    state = source.load_rows(source.init(), "item", [3], np.ones((1, 2)))
    copy.add([3])
    with pytest.raises(ValueError, match="one vector of 3 numbers per key"):
        copy.move(source, state, wide, wide.init())
    assert copy.batches == 1  # and nothing is lost
    with pytest.raises(KeyError, match="no table is named 'user'"):
        rl.TouchedCopy("user").move(source, state, wide, wide.init())

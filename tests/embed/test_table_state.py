"""Each row is at one place: what is written twice is anything on some backends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardjax.embed import RowGradients
from shardjax.embed.optimizers import split_state
from shardjax.embed.table_state import (
    TableLeaf,
    block_gradients,
    init_table,
    read_block,
    sum_gradients,
)

IDS = np.array([4, 0, 4, -2, 4, -1, 0], np.int32)
LEAF = TableLeaf(
    "t", (5, 2), jnp.dtype("float32"), split_state(optax.sgd(0.1), 2, np.float32, "t")
)


def make_table():
    return init_table(LEAF, jnp.arange(10.0).reshape(5, 2), 1)


def test_a_block_wants_each_row_once():
    table = make_table()
    block = jax.jit(lambda t: read_block(t, IDS, ()))(table)
    wanted = np.asarray(block.wanted)
    assert sorted(wanted[wanted >= 0]) == [0, 4]
    for row in (0, 4):
        assert wanted[block.places[row]] == row
        np.testing.assert_array_equal(block.rows[block.places[row]], table.rows[row])
    np.testing.assert_array_equal(np.asarray(block.rows)[wanted < 0], 0)
    grads = block_gradients(block, jnp.ones((7, 2)))
    np.testing.assert_array_equal(grads.ids, wanted)
    assert int(grads.bad_ids) == 1


def test_gradients_of_microbatches_are_summed_at_one_place_of_a_row():
    ids = jnp.array([[4, 0, -1], [-1, 4, 2]])
    grads = RowGradients(ids, 1 + jnp.arange(12.0).reshape(2, 3, 2), jnp.zeros(2))
    rows, sums, _ = jax.jit(lambda *a: sum_gradients(LEAF, *a, ()))(make_table(), grads)
    rows = np.asarray(rows)
    assert sorted(rows[rows >= 0]) == [0, 2, 4]
    for row, wanted in ((0, [3, 4]), (2, [11, 12]), (4, [1 + 9, 2 + 10])):
        np.testing.assert_array_equal(sums[int(np.argmax(rows == row))], wanted)

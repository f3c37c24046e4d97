import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from shardjax.embed import FeatureSpec, RowOptimizerError, TableSpec, rowwise_adagrad
from shardjax.embed.groups import plan_groups
from shardjax.embed.optimizers import split_state


def stateless(update):
    return optax.GradientTransformation(lambda p: optax.EmptyState(), update)


def sum_of_squares(grads, state, params=None):
    return grads / (1 + jnp.sum(grads**2)), state


def guarded_clip(grads, state, params=None):
    """Clipping by a global norm that hides what is not finite, and rarely triggers."""
    norm = jnp.linalg.norm(jnp.nan_to_num(grads, posinf=0, neginf=0))
    return grads * jnp.minimum(1, 100 / norm), state


def by_place(grads, state, params=None):
    return grads * jnp.arange(len(grads))[:, None], state


def gram(params):
    return jnp.eye(len(params))


OTHER_ROWS = "a gradient of .* in one row changes the update of other rows"

REFUSED = {
    "lamb": (optax.lamb(0.1), OTHER_ROWS),
    "lars": (optax.lars(0.1), OTHER_ROWS),
    "adafactor": (optax.adafactor(0.1), OTHER_ROWS),
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        OTHER_ROWS,
    ),
    "clip_that_never_triggers": (
        optax.chain(optax.clip_by_global_norm(1e30), optax.sgd(0.1)),
        OTHER_ROWS,
    ),
    "clip_by_block_rms": (optax.clip_by_block_rms(1e9), OTHER_ROWS),
    "adaptive_grad_clip": (optax.adaptive_grad_clip(0.1), OTHER_ROWS),
    "guarded_clip": (stateless(guarded_clip), "a gradient of 10000.0 in one row"),
    "novograd": (optax.novograd(0.1), OTHER_ROWS),
    "sm3": (optax.sm3(0.1), OTHER_ROWS),
    "muon": (optax.contrib.muon(0.1), OTHER_ROWS),
    "sum_of_squares": (stateless(sum_of_squares), OTHER_ROWS),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.1), 3), OTHER_ROWS),
    "zero_nans": (
        optax.chain(optax.zero_nans(), optax.sgd(0.1)),
        "a gradient of nan in one row changes state shared by all rows",
    ),
    "noisy_sgd": (
        optax.noisy_sgd(0.1, key=jax.random.key(0)),
        "a row's update depends on its place among the rows",
    ),
    "by_place": (stateless(by_place), ".* depends on its place among the rows"),
    "lbfgs": (optax.lbfgs(0.1), r"a leaf of its state has the shapes .* not \[rows, "),
    "gram": (
        optax.GradientTransformation(gram, lambda g, s, p=None: (g, s)),
        r".* has the shapes \[\(5, 5\), \(7, 7\), \(4096, 4096\)\] for \[5, 7, 4096\] rows",
    ),
    "structure": (
        optax.GradientTransformation(
            lambda p: [jnp.zeros(3)] * min(len(p), 9), lambda g, s, p=None: (g, s)
        ),
        "the structure of its state depends on the number of rows",
    ),
    "init_fails": (
        optax.GradientTransformation(lambda p: p["w"], lambda g, s, p=None: (g, s)),
        r"its init fails on rows of shape \[n, 4\]",
    ),
    "polyak_sgd": (
        optax.polyak_sgd(),
        r"its update fails on \(gradients, state, rows\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_mix_rows_are_refused(name):
    tx, reason = REFUSED[name]
    start = "The optimizer of table 'item' does not work row by row: "
    with pytest.raises(RowOptimizerError, match=start + reason):
        split_state(tx, 4, jnp.dtype("float32"), "item")


def test_adafactor_is_refused_where_it_would_factor():
    # up to dim 127 it keeps one number per element, from 128 on per row and column
    tx = optax.adafactor(
        0.1, clipping_threshold=None, multiply_by_parameter_scale=False
    )
    split_state(tx, 4, jnp.dtype("float32"), "item")
    with pytest.raises(RowOptimizerError, match="has the shapes"):
        split_state(tx, 128, jnp.dtype("float32"), "item")


def test_a_collection_names_the_table_it_refuses():
    features = {
        "x": FeatureSpec(TableSpec("fine", 4)),
        "y": FeatureSpec(TableSpec("coarse", 4, optax.lamb(0.1))),
    }
    with pytest.raises(RowOptimizerError, match="The optimizer of table 'coarse'"):
        plan_groups(features, 2)


ACCEPTED = {
    "adam": (optax.adam(0.1), 2, 1),
    "adam_bf16_state": (optax.adam(0.1, mu_dtype=jnp.bfloat16), 2, 1),
    "amsgrad": (optax.amsgrad(0.1), 3, 1),
    "adagrad": (optax.adagrad(0.1), 1, 0),
    "adadelta": (optax.adadelta(0.1), 2, 0),
    "rmsprop": (optax.rmsprop(0.1, centered=True, momentum=0.9), 3, 0),
    "rprop": (optax.rprop(0.1), 2, 0),
    "yogi": (optax.yogi(0.1), 2, 1),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), 1, 0),
    "sign_sgd": (optax.sign_sgd(0.1), 0, 0),
    "identity": (optax.identity(), 0, 0),
    "clip_elements": (optax.chain(optax.clip(0.5), optax.adam(0.1)), 2, 1),
    "schedule": (optax.adam(optax.linear_schedule(0.1, 0.0, 9)), 2, 2),
    "inject": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 2, None),
    "rowwise": (rowwise_adagrad(0.1), 1, 1),
    "row_norm": (
        stateless(lambda g, s, p=None: (g / (1 + jnp.sum(g**2, 1, keepdims=True)), s)),
        0,
        0,
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_optimizers_that_work_row_by_row_are_taken(name):
    tx, per_row, shared = ACCEPTED[name]
    optimizer = split_state(tx, 4, jnp.dtype("float32"), "item")
    assert optimizer.is_row.count(True) == per_row
    if shared is not None:
        assert optimizer.is_row.count(False) == shared
    # a step of some rows is the same as a dense step of all, as far as those go
    rng = np.random.default_rng(0)
    rows, grads = rng.normal(size=(2, 9, 4)).astype(np.float32)
    state = tx.init(jnp.asarray(rows))
    updates, after = jax.jit(tx.update)(grads, state, rows)
    dense, (dense_rows, dense_shared) = rows + updates, optimizer.split(after)
    some = np.array([7, 0, 3])
    row_state, shared_state = optimizer.init(jnp.asarray(rows[some]))
    for leaf, like in zip(row_state, optimizer.row_leaves, strict=True):
        assert (leaf.shape, leaf.dtype) == ((3, *like.shape), like.dtype)
    got = jax.jit(optimizer.update)(grads[some], row_state, shared_state, rows[some])
    np.testing.assert_allclose(got[0], dense[some], rtol=1e-6, atol=1e-7)
    for x, y in zip(got[1], dense_rows, strict=True):
        np.testing.assert_allclose(x, y[some], rtol=1e-6)
    for x, y in zip(got[2], dense_shared, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_keep_their_dtype(dtype):
    optimizer = split_state(rowwise_adagrad(0.1), 4, jnp.dtype(dtype), "item")
    assert [leaf.dtype for leaf in optimizer.row_leaves] == [np.float32]
    rows = jnp.ones((3, 4), dtype)
    row_state, shared = optimizer.init(rows)
    moved, row_state, _ = optimizer.update(rows, row_state, shared, rows)
    assert moved.dtype == jnp.dtype(dtype)
    assert row_state[0].dtype == np.float32


def test_rowwise_adagrad_by_hand():
    tx = rowwise_adagrad(0.5, initial_accumulator=1.0, eps=0.25)
    rows = jnp.array([[1.0, 1.0], [2.0, 2.0]])
    state = tx.init(rows)
    for grads, updates, sums in (
        ([[3.0, 1.0], [0.0, 0.0]], [-0.5 * 3 / (6**0.5 + 0.25)], [6.0, 1.0]),
        ([[0.0, 2.0], [0.0, 0.0]], [0.0], [8.0, 1.0]),
    ):
        got, state = tx.update(jnp.array(grads), state, rows)
        np.testing.assert_allclose(got[0, 0], updates[0], rtol=1e-6)
        np.testing.assert_array_equal(got[1], 0)
        np.testing.assert_allclose(state.accumulator, sums, rtol=1e-6)
    assert int(state.count) == 2


def test_rowwise_adagrad_follows_a_schedule():
    tx = rowwise_adagrad(lambda count: jnp.where(count == 0, 1.0, 0.0))
    rows = jnp.ones((1, 2))
    first, state = tx.update(rows, tx.init(rows))
    second, _ = tx.update(rows, state)
    np.testing.assert_allclose(first, [[-1.0, -1.0]])
    np.testing.assert_array_equal(second, [[0.0, 0.0]])


@pytest.mark.parametrize(
    "tx",
    [
        rowwise_adagrad(0.1),
        optax.adagrad(0.1, initial_accumulator_value=0.0),
        optax.adam(0.1),
        optax.rmsprop(0.1),
    ],
)
def test_a_zero_gradient_gives_no_nan(tx):
    rows = jnp.ones((2, 3))
    updates, _ = tx.update(jnp.zeros((2, 3)), tx.init(rows), rows)
    np.testing.assert_array_equal(updates, 0)

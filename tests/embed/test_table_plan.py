"""Tables that a loss looks up itself, against dense optax steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax.embed import RowGradients, RowOptimizerError, plan_tables
from shardjax.embed.in_graph import lookup
from shardjax.embed.lookup import update
from shardjax.mesh import make_mesh

ROWS, DIM, EXAMPLES = 21, 3, 16  # rows that neither 2 nor 8 divide
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
}


def make_params():
    rng = np.random.default_rng(0)
    tables = {
        name: rng.normal(size=(ROWS, DIM)).astype(np.float32) for name in OPTIMIZERS
    }
    return {"tables": tables, "w": rng.normal(size=DIM).astype(np.float32)}


def paths_of(values):
    return {f"tables/{name}": value for name, value in values.items()}


def loss(params, ids, weights):
    """Sum over examples, of ids [examples, 2] that are looked up in a loop too."""

    def body(x, column):
        x = x + sum(
            lookup(table, column, padding_id=-1) for table in params["tables"].values()
        )
        return jnp.tanh(x), None

    x, _ = jax.lax.scan(jax.checkpoint(body), jnp.zeros((len(ids), DIM)), ids.T)
    x = x + lookup(params["tables"]["sgd"], ids[:, 0], padding_id=-1)
    return jnp.sum((x @ params["w"]) ** 2 * weights)


def make_step(plan, microbatches=1):
    """`step(w, tables, ids, weights)` over the mesh of a plan."""

    def local(w, tables, ids, weights):
        grad = plan.value_and_grad(loss)

        def body(tables, part):
            params = {"tables": dict.fromkeys(OPTIMIZERS), "w": w}
            value, grads, rows, tables = grad(params, tables, *part)
            return tables, (value, grads["w"], rows)

        parts = jax.tree.map(
            lambda x: x.reshape(microbatches, -1, *x.shape[1:]), (ids, weights)
        )
        tables, (value, grads, rows) = jax.lax.scan(body, tables, parts)
        tables = plan.update(tables, rows)
        bad = sum(r.bad_ids.sum() for r in rows.values())
        out = value.sum(), grads.sum(0), bad
        return tables, jax.lax.psum(out, plan.axes) if plan.axes else out

    if plan.mesh is None:
        return jax.jit(local, donate_argnums=1)
    batch = jax.P(plan.axes)
    return jax.jit(
        jax.shard_map(
            local,
            mesh=plan.mesh,
            in_specs=(jax.P(), plan.specs(), batch, batch),
            out_specs=(plan.specs(), jax.P()),
            check_vma=False,
        ),
        donate_argnums=1,
    )


BATCHES = {
    "skewed": np.minimum(np.random.default_rng(1).zipf(1.5, (EXAMPLES, 2)), ROWS) - 1,
    "equal": np.full((EXAMPLES, 2), 4),
    "padded": np.random.default_rng(2).integers(-1, 3, (EXAMPLES, 2)),
    "nothing": np.full((EXAMPLES, 2), -1),
}


@jax.jit
def dense_step(w, tables, states, ids, weights):
    def of(w, tables):
        return loss({"tables": tables, "w": w}, ids, weights)

    value, (grads, row_grads) = jax.value_and_grad(of, (0, 1))(w, tables)
    touched = jnp.zeros(ROWS, bool).at[jnp.where(ids < 0, ROWS, ids)].set(True)
    tables, states = dict(tables), dict(states)
    for name, tx in OPTIMIZERS.items():
        tables[name], states[name] = update(
            tx, tables[name], states[name], row_grads[name], touched
        )
    return value, grads, tables, states


def check_training(plan, microbatches=1):
    params = make_params()
    tables = plan.init(params)
    step = make_step(plan, microbatches)
    dense, w = params["tables"], params["w"]
    dense = jax.tree.map(jnp.asarray, dense)
    states = {name: tx.init(dense[name]) for name, tx in OPTIMIZERS.items()}
    weights = np.linspace(0.5, 1.5, EXAMPLES, dtype=np.float32)
    for ids in (*BATCHES.values(), BATCHES["skewed"]):
        ids = ids.astype(np.int32)
        value, grads, dense, states = dense_step(w, dense, states, ids, weights)
        tables, (got, w_grads, bad) = step(w, tables, ids, weights)
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(w_grads, grads, rtol=1e-4, atol=1e-5)
        joined = plan.join(plan.split(params), tables)["tables"]
        for name, table in joined.items():
            np.testing.assert_allclose(
                table, dense[name], rtol=1e-4, atol=2e-5, err_msg=name
            )
        assert int(bad) == 0


def test_training_equals_dense_steps_of_the_rows_named(mesh):
    params = make_params()
    plan = plan_tables(
        params, list(paths_of(OPTIMIZERS)), paths_of(OPTIMIZERS), mesh=mesh
    )
    assert plan.parts == mesh.size
    tables = plan.init(params)
    share = -(-ROWS // mesh.size) * DIM
    for table in tables.values():
        assert table.rows.addressable_shards[0].data.size == share
    check_training(plan, microbatches=2 if mesh.axis_sizes[0] == 4 else 1)


def test_training_on_one_device_needs_no_mesh():
    params = make_params()
    plan = plan_tables(params, list(paths_of(OPTIMIZERS)), paths_of(OPTIMIZERS))
    check_training(plan, microbatches=4)


def test_the_state_moves_to_other_devices():
    params, optimizer = {"t": jnp.arange(42.0).reshape(2, 7, 3)}, optax.adam(0.1)
    here = plan_tables(params, ["t"], optimizer)
    grads = RowGradients(jnp.array([13, 2]), jnp.ones((2, 3)), jnp.int32(0))
    tables = jax.jit(here.update)(here.init(params), {"t": grads})
    there = plan_tables(params, ["t"], optimizer, mesh=make_mesh("4x2"))
    moved = there.place(tables)
    like = there.init(params)
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
    assert int(moved["t"].shared[0]) == 1
    back = here.place(moved)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tables), strict=True):
        np.testing.assert_array_equal(x, y)
    assert (
        np.asarray(moved["t"].row_state[0])[:14].any(1).nonzero()[0] == [2, 13]
    ).all()
    for rows in (15, 13):
        other = plan_tables({"t": jnp.ones((rows, 3))}, ["t"], optimizer)
        with pytest.raises(ValueError, match=f"no table 't' of {rows} rows of dim 3"):
            other.place(moved)


def simple_loss(params, ids):
    return jnp.sum(lookup(params["t"], ids) @ params["w"])


def simple_plan(dtype=np.float32, tx=None):
    params = {"t": jnp.ones((6, 2), dtype), "w": jnp.ones(2)}
    plan = plan_tables(params, ["t"], tx or optax.sgd(0.5))
    return plan, plan.split(params), plan.init(params)


def test_bad_ids_are_counted_and_never_train():
    plan, dense, tables = simple_plan()
    grad = jax.jit(plan.value_and_grad(simple_loss))
    ids = jnp.array([[6, -1, 2], [2, 3, -7]])
    value, grads, rows, tables = grad(dense, tables, ids)
    assert np.isnan(value) and np.isnan(grads["w"]).all()
    assert int(rows["t"].bad_ids) == 3
    after = jax.jit(plan.update)(tables, rows)["t"].rows
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(after[:, 0], [1, 1, 0, 0.5, 1, 1])


def test_an_empty_batch_moves_nothing_but_counts_the_step():
    plan, dense, tables = simple_plan(tx=optax.adam(0.1))
    grad = jax.jit(plan.value_and_grad(simple_loss))
    value, grads, rows, tables = grad(dense, tables, jnp.zeros((0, 3), jnp.int32))
    assert value == 0 and (grads["w"] == 0).all()
    after = jax.jit(plan.update)(tables, rows)["t"]
    np.testing.assert_array_equal(after.rows, 1)
    assert [int(x) for x in after.shared] == [1]


def test_a_step_that_is_not_finite_leaves_everything():
    plan, dense, tables = simple_plan(tx=optax.adam(0.1))
    _, _, rows, tables = jax.jit(plan.value_and_grad(simple_loss))(
        dense, tables, jnp.array([1, 1])
    )
    after = jax.jit(plan.update)(tables, rows, jnp.array(False))["t"]
    np.testing.assert_array_equal(after.rows, 1)
    assert [int(x) for x in after.shared] == [0]


def test_many_duplicates_of_bfloat16_rows_are_summed_in_float32():
    plan, dense, tables = simple_plan(jnp.bfloat16, optax.sgd(2.0**-9))
    ids = jnp.full(512, 3)
    value, _, rows, tables = jax.jit(plan.value_and_grad(simple_loss))(
        dense, tables, ids
    )
    assert value.dtype == jnp.float32
    after = jax.jit(plan.update)(tables, rows)["t"].rows
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after[3].astype(jnp.float32), 0)  # 1 - 512 / 2**9


def test_ids_drawn_anew_in_each_trace_read_nan():
    plan, dense, tables = simple_plan()
    drawn = iter(([1, 2], [4, 5]))

    def fickle(params, x):
        return simple_loss(params, jnp.array(next(drawn))) + x

    value, *_ = plan.value_and_grad(fickle)(dense, tables, 0.0)
    assert np.isnan(value)


def test_a_table_as_an_array_is_refused_in_a_step():
    plan, dense, tables = simple_plan()
    for use in (lambda t: jnp.dot(jnp.ones(6), t), lambda t: t[1]):
        with pytest.raises(TypeError, match="only be looked up.*sparse=False"):
            plan.value_and_grad(lambda p, use=use: use(p["t"]).sum())(dense, tables)


def test_a_stack_of_tables_is_looked_up_by_layer():
    params = {"t": jnp.arange(12.0).reshape(2, 3, 2)}
    plan = plan_tables(params, ["t"], optax.sgd(1.0))
    dense, tables = plan.split(params), plan.init(params)

    def loss(params, ids):
        def body(total, table):
            return total + lookup(table, ids).sum(), None

        return jax.lax.scan(body, 0.0, params["t"])[0]

    value, _, rows, tables = jax.jit(plan.value_and_grad(loss))(
        dense, tables, jnp.array([2, 0, 2])
    )
    assert value == params["t"][:, [2, 0, 2]].sum()
    got = plan.join(dense, jax.jit(plan.update)(tables, rows))["t"]
    moved = params["t"] - jnp.array([1.0, 0.0, 2.0])[None, :, None]
    np.testing.assert_array_equal(got, moved)
    with pytest.raises(ValueError, match=r"table of \[2\] layers.*nnx.scan"):
        plan.value_and_grad(lambda p: lookup(p["t"], jnp.arange(2)).sum())(
            dense, tables
        )


PARAMS = {"t": np.ones((6, 2), np.float32), "n": np.ones((6, 2), int), "b": np.ones(3)}
SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ("t", TypeError, "sequence of paths, got 't'"),
        (["t", "t"], ValueError, "name each table once"),
        (["x"], ValueError, "path 'x' of a table; there are .*'t'"),
        (["n"], TypeError, "'n' must hold floats, got int64"),
        (["b"], ValueError, r"'b' must have the shape.*got \[3\]"),
    ],
    ids=str,
)
def test_tables_that_cannot_be_are_refused(paths, error, message):
    with pytest.raises(error, match=message):
        plan_tables(PARAMS, paths, SGD)


def test_optimizers_and_axes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"tables \['t'\], got those of \['x'\]"):
        plan_tables(PARAMS, ["t"], {"x": SGD})
    with pytest.raises(ValueError, match="those of a mesh, got .* without one"):
        plan_tables(PARAMS, ["t"], SGD, axes=("data",))
    with pytest.raises(RowOptimizerError, match="'t' does not work row by row"):
        plan_tables(PARAMS, ["t"], optax.adafactor(0.1))
    with pytest.raises(ValueError, match=r"axes of the mesh.*got \['rows'\]"):
        plan_tables(PARAMS, ["t"], SGD, mesh=make_mesh("1x1"), axes=("rows",))

"""Flops of matrix products and convolutions, against numbers worked out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from shardjax.mesh import make_mesh
from shardjax.profiling import (
    Flops,
    UnknownFlops,
    count_flops,
    count_jaxpr_flops,
)

pytestmark = pytest.mark.usefixtures("fused")


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _mlp(layers, x, *, remat=False):
    """`x` [batch, dim] through layers [depth, dim, dim], summed."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    body = jax.checkpoint(layer) if remat else layer
    return lax.scan(body, x, layers)[0].sum()


BATCH, DIM, DEPTH = 32, 16, 5
FORWARD = DEPTH * 2 * BATCH * DIM * DIM
ARGS = (_array(DEPTH, DIM, DIM), _array(BATCH, DIM))


def test_forward_of_scanned_layers():
    assert count_flops(_mlp, *ARGS) == Flops(FORWARD, FORWARD, {"dot_general": FORWARD})


def test_gradient_is_three_times_and_with_remat_four_times_forward():
    grad = jax.grad(_mlp, argnums=(0, 1))
    assert count_flops(grad, *ARGS).total == 3 * FORWARD
    assert count_flops(partial(grad, remat=True), *ARGS).total == 4 * FORWARD


def test_gradient_of_the_first_layers_input_is_not_counted_where_it_is_not_needed():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    once = 2 * BATCH * DIM * DIM
    args = (_array(DIM, DIM), _array(BATCH, DIM))
    assert count_flops(jax.grad(loss), *args).total == 2 * once


def test_products_of_every_form():
    einsum = partial(jnp.einsum, "bhqd,bhkd->bhqk")
    args = (_array(2, 3, 5, 7), _array(2, 3, 11, 7))
    assert count_flops(einsum, *args).total == 2 * 2 * 3 * 5 * 11 * 7
    assert count_flops(jnp.outer, _array(3), _array(4)).total == 0  # a plain product
    assert count_flops(jnp.vdot, _array(9), _array(9)).total == 2 * 9
    both = partial(jnp.tensordot, axes=2)
    assert count_flops(both, _array(4, 5, 6), _array(5, 6, 7)).total == 2 * 4 * 30 * 7


def test_ragged_products_give_each_row_to_one_group():
    x, w, sizes = _array(12, 4), _array(3, 4, 8), jax.ShapeDtypeStruct((3,), jnp.int32)
    once = 2 * 12 * 4 * 8

    def loss(x, w, sizes):
        return lax.ragged_dot(x, w, sizes).sum()

    assert count_flops(loss, x, w, sizes).total == once
    found = count_flops(jax.value_and_grad(loss, argnums=(0, 1)), x, w, sizes)
    assert found.by_primitive == {"ragged_dot_general": 3 * once}


CONVOLUTIONS = {
    "valid": dict(window_strides=(1, 1), padding="VALID"),
    "same": dict(window_strides=(1, 1), padding="SAME"),
    "strided": dict(window_strides=(2, 3), padding=((2, 1), (0, 2))),
    "dilated": dict(window_strides=(1, 2), padding="VALID", rhs_dilation=(2, 1)),
    "transposed": dict(
        window_strides=(1, 1), padding=((1, 2), (0, 1)), lhs_dilation=(2, 3)
    ),
}


def _conv(x, kernel, **options):
    return lax.conv_general_dilated(
        x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def test_a_convolution_against_the_formula():
    found = count_flops(
        partial(_conv, **CONVOLUTIONS["valid"]), _array(2, 9, 8, 3), _array(3, 2, 3, 4)
    )
    total = 2 * (2 * 7 * 7 * 4) * (3 * 2 * 3)
    assert found == Flops(total, total, {"conv_general_dilated": total})


def _true_products(x, kernel, options):
    """Products of two values that are not padding: of ones, the sum of all outputs."""
    return int(_conv(jnp.ones(x), jnp.ones(kernel), **options).sum())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_product_with_padding_or_holes_is_none(name):
    x, kernel, options = (2, 9, 8, 3), (3, 2, 3, 4), CONVOLUTIONS[name]
    forward = 2 * _true_products(x, kernel, options)
    conv = partial(_conv, **options)
    assert count_flops(conv, _array(*x), _array(*kernel)).total == forward

    def both(x, kernel):
        return jax.value_and_grad(lambda *a: conv(*a).sum(), argnums=(0, 1))(x, kernel)

    assert count_flops(both, _array(*x), _array(*kernel)).total == 3 * forward


@pytest.mark.parametrize("groups", ["feature_group_count", "batch_group_count"])
def test_grouped_convolutions(groups):
    batch = 2 if groups == "batch_group_count" else 1
    features = 6 if groups == "feature_group_count" else 3
    x, kernel = (2 * batch, 9, 8, features), (3, 2, 3, 4)
    options = dict(window_strides=(1, 1), padding="VALID", **{groups: 2})
    forward = 2 * _true_products(x, kernel, options)
    found = count_flops(partial(_conv, **options), _array(*x), _array(*kernel))
    assert found.total == forward


def test_calls_are_entered():
    w = _array(4, 4)
    once = 2 * 4**3

    @jax.custom_jvp
    def f(x):
        return x @ x

    f.defjvp(lambda x, t: (f(*x), x[0] @ t[0] @ x[0]))

    @jax.custom_vjp
    def g(x):
        return x @ x

    g.defvjp(lambda x: (g(x), x), lambda x, t: (x @ t @ x @ t,))

    def h(x):
        return jax.jit(jax.checkpoint(lambda x: g(f(x)) @ x))(x)

    assert count_flops(h, w).total == 3 * once
    assert count_flops(jax.grad(lambda x: g(x).sum()), w).total == (1 + 3) * once
    assert count_flops(lambda x: jax.jvp(f, (x,), (x,)), w).total == (1 + 2) * once
    assert count_flops(jax.vmap(g), _array(5, 4, 4)).total == 5 * once


def test_nested_loops_multiply_and_counted_ones_are_known():
    once = 2 * 4**3

    def outer(x):
        def body(x, _):
            return lax.fori_loop(0, 3, lambda _, y: y @ y, x), None

        return lax.scan(body, x, None, length=7)[0]

    assert count_flops(outer, _array(4, 4)).total == 21 * once

    for start, step, trips in [(0, 1, 9), (1, 2, 4), (2, 2, 4), (9, 1, 0)]:
        counted = partial(_until, 9, start, lambda i, step=step: i + step)
        assert count_flops(counted, _array(4, 4)).total == trips * once, (start, step)


def _until(limit, start, advance, x):
    """Squares `x` while a counter is below a limit."""

    def body(carry):
        return advance(carry[0]), carry[1] @ carry[1]

    return lax.while_loop(lambda carry: carry[0] < limit, body, (start, x))[1]


@pytest.mark.parametrize(
    "loop",
    [
        lambda x, n: lax.fori_loop(0, n, lambda _, y: y @ y, x),
        lambda x, n: lax.while_loop(lambda y: y.sum() < n, lambda y: y @ y, x),
        lambda x, n: _until(9, n, lambda i: i + 1, x),
        lambda x, n: _until(9, 1, lambda i: i * 2, x),
        lambda x, n: _until(9, 0, lambda i: i + n, x),
        lambda x, n: _until(9, 0, lambda i: i - 1, x),
        lambda x, n: _until(9.0, 0.0, lambda i: i + 1.0, x),
    ],
    ids=["traced", "data", "start", "doubling", "step", "down", "float"],
)
def test_other_loops_are_listed_and_not_counted(loop):
    once = 2 * 4**3

    def step(x, n):
        def body(x, _):
            return loop(x @ x, n), None

        return lax.scan(body, x, None, length=5)[0]

    found = count_flops(step, _array(4, 4), jax.ShapeDtypeStruct((), jnp.int32))
    assert found.total == 5 * once
    assert found.unknown == (UnknownFlops("scan/while", 5, once),)


def test_a_loop_in_an_unknown_loop_is_listed_too():
    def inner(n, x):
        return lax.fori_loop(0, n, lambda _, y: y @ y, x)

    def f(x, n):
        return lax.fori_loop(0, n, lambda _, y: inner(n, y) @ y, x)

    found = count_flops(f, _array(4, 4), jax.ShapeDtypeStruct((), jnp.int32))
    assert found.total == 0
    assert found.unknown == (
        UnknownFlops("while", 1, 128),
        UnknownFlops("while/while", 1, 128),
    )


def test_unknown_loops_without_products_are_none():
    def f(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    assert count_flops(f, _array(4, 4)) == Flops()


def test_the_largest_branch_counts():
    def f(i, x):
        branches = [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x]
        return lax.switch(i, branches, x)

    found = count_flops(f, jax.ShapeDtypeStruct((), jnp.int32), _array(4, 4))
    assert found == Flops(256, 256, {"dot_general": 256})


def test_unknown_loops_of_every_branch_are_listed():
    def f(i, x):
        def loop(x):
            return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

        return lax.cond(i, loop, lambda x: x @ x, x)

    found = count_flops(f, jax.ShapeDtypeStruct((), jnp.bool_), _array(4, 4))
    assert found.total == 128
    assert [part.where for part in found.unknown] == ["cond/while"]


def test_shard_map_counts_per_device_and_over_all():
    mesh = make_mesh("4x2")

    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def inside(x):
        return lax.scan(lambda c, _: (c @ c.T @ c, None), x, None, length=3)[0]

    found = count_flops(lambda x: inside(x).T @ x, _array(32, 16))
    local, outside = 3 * 2 * (2 * 8 * 8 * 16), 2 * 16 * 16 * 32
    assert found.per_device == local + outside
    assert found.total == 8 * local + outside
    assert found.by_primitive == {"dot_general": found.total}


def test_axes_of_nested_shard_maps_multiply_once():
    mesh = make_mesh("4x2")

    def inner(x):
        return x @ x

    def outer(x):
        nested = jax.shard_map(
            inner, in_specs=P(), out_specs=P(), axis_names={"model"}, check_vma=False
        )
        return nested(x) + x @ x

    found = count_flops(
        jax.shard_map(
            outer,
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            axis_names={"data"},
            check_vma=False,
        ),
        _array(4, 4),
    )
    once = 2 * 4**3
    assert found.per_device == 2 * once
    assert found.total == (8 + 4) * once


def test_unknown_loops_in_shard_map_are_entered_on_every_device():
    mesh = make_mesh("8x1")

    def local(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x.T @ x, x)

    f = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    (part,) = count_flops(f, _array(16, 4)).unknown
    assert part == UnknownFlops("shard_map/while", 8, 2 * 2 * 2 * 2 * 4)


def test_a_body_that_runs_nobody_knows_how_often_is_unknown():
    def solve(x, b):
        def matvec(v):
            return x @ v

        return lax.custom_linear_solve(matvec, b, lambda mv, b: mv(b), symmetric=True)

    found = count_flops(solve, _array(4, 4), _array(4))
    assert found.total == 0
    assert [part.where for part in found.unknown] == ["custom_linear_solve"]


def test_a_kernel_is_unknown():
    def kernel(x, out):
        out[...] = x[...] @ x[...]

    def f(x):
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    found = count_flops(f, _array(8, 8))
    assert found.unknown == (UnknownFlops("pallas_call", 1, 2 * 8**3),)


def test_a_jaxpr_counts_as_its_function():
    jaxpr = jax.make_jaxpr(_mlp)(*ARGS)
    assert count_jaxpr_flops(jaxpr) == count_flops(_mlp, *ARGS)
    assert count_jaxpr_flops(jaxpr.jaxpr) == count_flops(_mlp, *ARGS)
    assert count_jaxpr_flops(jax.jit(_mlp).trace(*ARGS).jaxpr).total == FORWARD
    with pytest.raises(
        TypeError, match=r"`jaxpr` must be a jaxpr, got function .*make_"
    ):
        count_jaxpr_flops(_mlp)


def test_xla_agrees_where_there_is_no_loop():
    def f(x, kernel, w):
        y = _conv(x, kernel, **CONVOLUTIONS["strided"])
        return y.reshape(2, -1) @ w

    args = [np.ones(s, np.float32) for s in [(2, 9, 8, 3), (3, 2, 3, 4), (60, 7)]]
    cost = jax.jit(f).lower(*args).compile().cost_analysis()
    assert cost is not None
    assert count_flops(f, *args).total == pytest.approx(cost["flops"], rel=0.02)

"""Collectives in real compiled programs, against bytes worked out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from shardjax.mesh import make_mesh
from shardjax.profiling import collectives, wire_bytes

pytestmark = pytest.mark.usefixtures("fused")

LENGTH, WORDS = 5, 96
BYTES = 4 * WORDS
MESH = "4x2"


def _psum(x, axis, n):
    return lax.psum(x, axis) / n


def _scatter_and_gather(x, axis, n):
    part = jnp.tanh(lax.psum_scatter(x, axis, tiled=True))
    return lax.all_gather(part, axis, tiled=True)


def _all_to_all(x, axis, n):
    return lax.all_to_all(x.reshape(n, -1), axis, 0, 0, tiled=True).reshape(x.shape)


def _shift(x, axis, n):
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def _compile(body, mesh, *args, length=LENGTH):
    """A program that applies `body` some times to 96 words on every device."""

    def local(x):
        return lax.scan(lambda c, _: (body(c), None), x, None, length=length)[0]

    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(f).lower(jnp.ones(WORDS)).compile()


@pytest.mark.parametrize("axis", ["data", "model", ("data", "model")])
def test_kinds_sizes_and_bytes_on_each_axis_in_a_loop(axis):
    mesh = make_mesh(MESH)
    n = {"data": 4, "model": 2}.get(axis, 8)
    rows = np.arange(8).reshape(4, 2)
    groups = {"data": rows.T, "model": rows}.get(axis, rows.reshape(1, 8)).tolist()

    def body(x):
        for f in (_psum, _scatter_and_gather, _all_to_all, _shift):
            x = f(x, axis, n)
        return x

    share = (n - 1) / n * BYTES
    expected = {
        "all-reduce": (BYTES, BYTES, 2 * share),
        "reduce-scatter": (BYTES, BYTES // n, share),
        "all-gather": (BYTES // n, BYTES, share),
        "all-to-all": (BYTES, BYTES, share),
        "collective-permute": (BYTES, BYTES, BYTES),
    }
    found = collectives(_compile(body, mesh), devices=mesh)
    sizes = {c.kind: (c.operand_bytes, c.result_bytes, c.bytes_sent) for c in found}
    assert sizes == expected
    for one in found:
        assert one.times == LENGTH
        assert not one.conditional
        assert one.group_size == n
        assert one.axes == ((axis,) if isinstance(axis, str) else axis)
        assert [list(group) for group in one.groups] == groups
    total = LENGTH * sum(sent for _, _, sent in expected.values())
    sums = wire_bytes(found)
    assert sums.total == pytest.approx(total)
    assert sums.by_kind["all-reduce"] == LENGTH * 2 * share
    assert sums.by_group_size == {n: pytest.approx(total)}
    assert sums.by_axes == {found[0].axes: pytest.approx(total)}
    assert sums.unknown == ()


def test_sums_tell_axes_apart():
    mesh = make_mesh(MESH)

    def body(x):
        return _shift(_psum(x, "data", 4), "model", 2)

    sums = wire_bytes(collectives(_compile(body, mesh), devices=mesh))
    data, model = LENGTH * 2 * 3 / 4 * BYTES, LENGTH * BYTES
    assert sums.by_axes == {("data",): data, ("model",): model}
    assert sums.by_group_size == {4: data, 2: model}
    assert sums.by_kind == {"all-reduce": data, "collective-permute": model}
    assert sums.total == data + model


def test_the_compilers_own_collectives_are_found():
    mesh = make_mesh(MESH)
    x = jax.ShapeDtypeStruct(
        (64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data", "model"))
    )
    w = jax.ShapeDtypeStruct(
        (32, 16), jnp.float32, sharding=NamedSharding(mesh, P("model"))
    )
    compiled = jax.jit(lambda x, w: jnp.tanh(x @ w).sum()).lower(x, w).compile()
    product, loss = collectives(compiled, devices=mesh)
    assert (product.kind, product.axes, product.times) == ("all-reduce", ("model",), 1)
    assert product.bytes_sent == 16 * 16 * 4
    assert (loss.kind, loss.axes, loss.bytes_sent) == ("all-reduce", ("data",), 6.0)


def test_a_loop_of_unknown_length_is_reported_and_not_summed():
    mesh = make_mesh("8x1")

    def local(x, n):
        x = _psum(x, "data", 8)
        return lax.fori_loop(0, n, lambda _, x: _psum(jnp.tanh(x), "data", 8), x)

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    compiled = jax.jit(f).lower(jnp.ones(WORDS), jnp.int32(3)).compile()
    found = collectives(compiled, devices=mesh)
    sums = wire_bytes(found)
    assert sorted(map(str, (c.times for c in found))) == ["1", "None"]
    assert [c.times for c in sums.unknown] == [None]
    assert sums.total == 2 * 7 / 8 * BYTES


def test_branches_are_marked_and_all_count():
    mesh = make_mesh("8x1")

    def local(x, i):
        branches = [lambda x: x + 1, lambda x: _psum(x, "data", 8)]
        return lax.switch(i, branches, x) + _shift(x, "data", 8)

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    compiled = jax.jit(f).lower(jnp.ones(WORDS), jnp.int32(1)).compile()
    found = {c.kind: c for c in collectives(compiled, devices=mesh)}
    assert found["all-reduce"].conditional
    assert not found["collective-permute"].conditional
    assert wire_bytes(found.values()).total == (2 * 7 / 8 + 1) * BYTES


def test_nested_loops_multiply():
    mesh = make_mesh("8x1")

    def body(x):
        return lax.fori_loop(0, 3, lambda _, x: _psum(jnp.tanh(x), "data", 8), x)

    (one,) = collectives(_compile(body, mesh, length=7), devices=8)
    assert one.times == 21
    assert one.axes is None
    assert wire_bytes([one]).by_axes == {}
    assert wire_bytes([one]).total == 21 * 2 * 7 / 8 * BYTES


def test_arrays_of_one_collective_add_up():
    mesh = make_mesh("8x1")

    def local(x):
        return lax.psum((x, x[:7].astype(jnp.int32)), "data")

    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    found = collectives(jax.jit(f).lower(jnp.ones(WORDS)).compile(), devices=8)
    assert sum(c.operand_bytes for c in found) == BYTES + 7 * 4
    assert wire_bytes(found).total == 2 * 7 / 8 * (BYTES + 7 * 4)


def test_axes_are_those_of_a_mesh_in_an_order_of_its_own():
    devices = np.array(jax.devices()).reshape(2, 4).T
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    compiled = _compile(partial(_psum, axis="b", n=2), mesh)
    (one,) = collectives(compiled, devices=mesh)
    assert (one.axes, one.group_size) == (("b",), 2)


def test_a_program_without_collectives_has_none():
    compiled = jax.jit(jnp.tanh).lower(jnp.ones(3)).compile()
    assert collectives(compiled, devices=1) == []
    assert wire_bytes([]).total == 0


def test_wrong_arguments_are_refused():
    with pytest.raises(
        TypeError, match="`program` must be a compiled .* got int 3. Give"
    ):
        collectives(3, devices=8)
    with pytest.raises(
        ValueError, match="must have an ENTRY .* got 'nothing'. Give jax"
    ):
        collectives("nothing", devices=8)
    text = "ENTRY main () -> f32[] {\n}"
    with pytest.raises(
        TypeError, match="must be the mesh or the number .* got str '8'"
    ):
        collectives(text, devices="8")
    with pytest.raises(ValueError, match="`devices` must be positive, got 0. Give 1"):
        collectives(text, devices=0)
    compiled = _compile(partial(_psum, axis="data", n=8), make_mesh("8x1"))
    with pytest.raises(
        ValueError, match="got 4, but a group has device 7. Give the mesh"
    ):
        collectives(compiled, devices=4)

"""Mesh shapes, meshes and simulated devices."""

import logging

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from shardjax.mesh import (
    AXES,
    MeshShape,
    as_mesh_shape,
    ensure_devices,
    make_mesh,
    mesh_size,
    simulate_cpu_devices,
)
from tests.helpers import run_python


@pytest.mark.parametrize("text", ["1x1", "8x1", "3x2", "128x16"])
def test_shape_round_trips_through_text(text):
    assert str(MeshShape.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["8xq", "0x1", "1x0", "8", "8x1x1", "", "-8x1", " 8x1", "8 x 1", "08x1", "٨x1"],
)
def test_bad_text_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="must be DATAxMODEL.*got .*'8x1'") as error:
        MeshShape.parse(text)
    assert repr(text) in str(error.value)


def test_shape_is_not_read_from_a_number():
    with pytest.raises(TypeError, match="read from a string such as '8x1', got int 8"):
        make_mesh(8)  # pyright: ignore[reportArgumentType]


def test_shape_sizes_are_positive_integers():
    with pytest.raises(
        ValueError, match="`model` of a mesh shape must be positive, got 0"
    ):
        MeshShape(8, 0)
    with pytest.raises(
        TypeError, match="`data` of a mesh shape must be an integer, got"
    ):
        MeshShape(8.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        TypeError, match="`data` of a mesh shape must be an integer, got"
    ):
        MeshShape(True)
    assert MeshShape(np.int64(4)) == MeshShape(4, 1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "text", ["1x1", "8x1", "1x8", "4x2", "2x4", "3x1", "6x1", "3x2"]
)
def test_mesh_has_auto_axes_and_the_devices_in_order(text):
    mesh = make_mesh(text)
    shape = MeshShape.parse(text)
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.shape == (shape.data, shape.model)
    assert list(mesh.devices.flat) == jax.devices()[: shape.size]
    assert mesh_size(mesh) == shape.size
    assert as_mesh_shape(mesh) == shape


def test_mesh_on_given_devices_keeps_their_order():
    devices = jax.devices()[::-1]
    assert list(make_mesh("2x3", devices=devices).devices.flat) == devices[:6]


def test_explicit_mesh_is_rebuilt_with_auto_axes():
    own = jax.make_mesh((2, 3), AXES, axis_types=(AxisType.Explicit,) * 2)
    mesh = make_mesh(own)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert (mesh.devices == own.devices).all()
    # Model code that mixes sharded operands runs: it would not on Explicit axes.
    x = jax.device_put(np.ones((6, 4), np.float32), NamedSharding(mesh, P("data")))
    w = jax.device_put(
        np.ones((4, 6), np.float32), NamedSharding(mesh, P(None, "data"))
    )
    np.testing.assert_array_equal(
        jax.jit(lambda a, b: a @ b)(x, w), np.full((6, 6), 4.0)
    )


def test_mesh_with_other_axes_is_refused():
    own = Mesh(np.array(jax.devices()).reshape(8, 1), ("batch", "model"))
    with pytest.raises(ValueError, match=r"axes \('data', 'model'\).*got \('batch'"):
        make_mesh(own)


def test_mesh_and_devices_together_are_refused():
    with pytest.raises(
        ValueError, match="`devices` must not be given along with a mesh"
    ):
        make_mesh(make_mesh("8x1"), devices=jax.devices())


def test_too_few_cpu_devices_names_count_platform_and_fix():
    message = (
        r"mesh 3x3 needs 9 devices, found 8 \(platform cpu\).*simulate_cpu_devices"
    )
    with pytest.raises(ValueError, match=message):
        make_mesh("3x3")
    with pytest.raises(ValueError, match=message):
        ensure_devices("3x3")


class _Gpu:
    platform = "gpu"


def test_too_few_accelerators_names_count_platform_and_fix(monkeypatch):
    message = r"mesh 8x1 needs 8 devices, found 2 \(platform gpu\).*JAX_PLATFORMS=cpu"
    with pytest.raises(ValueError, match=message):
        make_mesh("8x1", devices=[_Gpu(), _Gpu()])  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(jax, "devices", lambda: [_Gpu(), _Gpu()])
    with pytest.raises(ValueError, match=message):
        ensure_devices("8x1")


def test_no_devices_at_all_is_an_error():
    with pytest.raises(ValueError, match="needs 1 devices, found 0"):
        make_mesh("1x1", devices=[])


def test_simulating_after_jax_is_up():
    jax.devices()
    simulate_cpu_devices(8)
    simulate_cpu_devices(3)
    assert len(jax.devices()) == 8
    with pytest.raises(RuntimeError, match="9 CPU devices must be .* runs with 8"):
        simulate_cpu_devices(9)


def test_simulated_count_is_a_positive_integer():
    with pytest.raises(ValueError, match="`count` must be positive, got 0"):
        simulate_cpu_devices(0)
    with pytest.raises(TypeError, match="`count` must be an integer, got str '8'"):
        simulate_cpu_devices("8")  # pyright: ignore[reportArgumentType]


def test_ensure_devices_says_nothing_when_nothing_is_simulated(caplog):
    caplog.set_level(logging.INFO)
    ensure_devices("1x1")
    assert not caplog.records


def test_fresh_process_simulates_devices_and_says_so_once():
    program = """
import logging
import jax
import shardjax as sj
logging.basicConfig(level=logging.INFO, format="%(message)s")
sj.ensure_devices("3x2")
sj.ensure_devices("3x2")
print(jax.device_count(), sj.make_mesh("3x2").devices.shape)
"""
    run = run_python(program)
    assert run.stdout.split("\n")[0] == "6 (3, 2)"
    assert run.stderr.count("mesh 3x2: simulating 6 devices on the CPU") == 1


def test_the_devices_of_a_mesh_are_divided_evenly_among_processes(monkeypatch):
    monkeypatch.setattr("shardjax.mesh.process_count", lambda: 3)
    with pytest.raises(
        ValueError, match="8 devices of mesh 8x1 must be divided evenly"
    ):
        ensure_devices("8x1")

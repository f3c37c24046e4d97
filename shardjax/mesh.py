"""Device meshes: "8x1" is 8 devices along the data axis and 1 along the model axis.

Every mesh of this library has the same two axes. The batch is split over ``data``;
what is too large for one device is split over ``model``, or over both. All axes are of
type Auto, stated explicitly: `jax.make_mesh` alone gives Explicit axes, on which
ordinary model code does not run.

On a CPU host, a mesh may have more devices than the host: JAX simulates them (slower,
same numbers), as long as the count is set before JAX is first used.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardjax.processes import process_count

DATA_AXIS = "data"
MODEL_AXIS = "model"
AXES = (DATA_AXIS, MODEL_AXIS)

Devices = Sequence[jax.Device]  # pyright: ignore[reportInvalidTypeForm]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshShape:
    """How many devices along each of the two mesh axes.

    Attributes:
      data: devices along the data axis, positive.
      model: devices along the model axis, positive.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is not positive.

    Example:
      >>> shape = MeshShape(4, 2)
      >>> str(shape), shape.size
      ('4x2', 8)
    """

    data: int
    model: int = 1

    def __post_init__(self):
        for name in AXES:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int | np.integer):
                raise TypeError(
                    f"`{name}` of a mesh shape must be an integer, got"
                    f" {type(size).__name__} {size!r}. Give a number of devices such"
                    " as MeshShape(8, 1)."
                )
            if size < 1:
                raise ValueError(
                    f"`{name}` of a mesh shape must be positive, got {size}. Use 1 for"
                    " an axis that is not needed."
                )
            object.__setattr__(self, name, int(size))

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Reads a shape such as "8x1", data times model.

        Args:
          text: two positive decimal integers joined by `x`.

        Returns:
          The shape.

        Raises:
          TypeError: if `text` is not a string.
          ValueError: if it does not have that form.

        Example:
          >>> MeshShape.parse("8x1")
          MeshShape(data=8, model=1)
        """
        if not isinstance(text, str):
            raise TypeError(
                f"a mesh shape is read from a string such as '8x1', got"
                f" {type(text).__name__} {text!r}. For numbers use MeshShape(8, 1)."
            )
        match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
        if match is None:
            raise ValueError(
                "a mesh shape must be DATAxMODEL, two positive integers, got"
                f" {text!r}. Write for example '8x1': 8 devices along the data axis, 1"
                " along the model axis."
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def size(self) -> int:
        """The number of devices in all."""
        return self.data * self.model

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"


def as_mesh_shape(shape: "str | MeshShape | Mesh") -> MeshShape:
    """Gives the shape that a string, a `MeshShape` or a mesh stands for.

    Args:
      shape: "8x1", a `MeshShape`, or a mesh with the axes data and model.

    Returns:
      The shape.

    Raises:
      TypeError: if it is none of the three.
      ValueError: if the string cannot be read or the mesh has other axes.

    Example:
      >>> as_mesh_shape("4x2")
      MeshShape(data=4, model=2)
    """
    if isinstance(shape, MeshShape):
        return shape
    if isinstance(shape, Mesh):
        if shape.axis_names != AXES:
            raise ValueError(
                f"a mesh must have the axes {AXES} in this order, got"
                f" {shape.axis_names}. Rename or reorder its axes; an axis that is not"
                " needed has size 1."
            )
        return MeshShape(*shape.devices.shape)
    return MeshShape.parse(shape)


def make_mesh(shape: str | MeshShape | Mesh, *, devices: Devices | None = None) -> Mesh:
    """Makes the mesh of a shape, with Auto axes.

    Args:
      shape: "8x1", a `MeshShape`, or a mesh of your own with the axes data and model,
        which is rebuilt on its own devices with Auto axes.
      devices: devices to use, the first `shape.size` of them; default
        `jax.devices()`, in an order that suits their topology.

    Returns:
      A mesh with the axes ``data`` and ``model``.

    Raises:
      ValueError: if there are fewer devices than the shape needs, or the shape is bad.
      TypeError: if `shape` is of another kind.

    Example:
      >>> mesh = make_mesh("1x1")
      >>> mesh.axis_names, mesh.size
      (('data', 'model'), 1)
    """
    mesh_shape = as_mesh_shape(shape)
    types = (AxisType.Auto,) * len(AXES)
    if isinstance(shape, Mesh):
        if devices is not None:
            raise ValueError(
                "`devices` must not be given along with a mesh, which has its own. Give"
                f" the shape {str(mesh_shape)!r} instead of the mesh."
            )
        return Mesh(shape.devices, AXES, axis_types=types)
    available = list(jax.devices() if devices is None else devices)
    if len(available) < mesh_shape.size:
        raise ValueError(_too_few_devices(mesh_shape, available))
    sizes = (mesh_shape.data, mesh_shape.model)
    chosen = available[: mesh_shape.size]
    if devices is not None:
        return Mesh(np.array(chosen).reshape(sizes), AXES, axis_types=types)
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=chosen)


def mesh_size(mesh: Mesh) -> int:
    """Counts the devices of a mesh.

    Args:
      mesh: any mesh.

    Returns:
      The product of its axis sizes.

    Example:
      >>> mesh_size(make_mesh("1x1"))
      1
    """
    return mesh.devices.size


def simulate_cpu_devices(count: int) -> None:
    """Makes JAX's CPU backend show `count` devices.

    Must run before the first JAX operation. It affects only the CPU backend: where JAX
    has an accelerator, `jax.devices()` still lists that.

    Args:
      count: how many devices to show, positive.

    Raises:
      TypeError: if `count` is not an integer.
      ValueError: if it is not positive.
      RuntimeError: if JAX already runs with fewer CPU devices.

    Example:
      >>> simulate_cpu_devices(1)
      >>> len(jax.devices("cpu")) >= 1
      True
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise TypeError(
            f"`count` must be an integer, got {type(count).__name__} {count!r}. Give a"
            " number of devices such as 8."
        )
    if count < 1:
        raise ValueError(f"`count` must be positive, got {count}. Give 1 or more.")
    if _request_cpu_devices(int(count)):
        return
    found = len(jax.devices("cpu"))
    if found < count:
        raise RuntimeError(
            f"{count} CPU devices must be asked for before the first JAX operation, but"
            f" JAX already runs with {found}. Call simulate_cpu_devices({count})"
            " earlier, right after the imports."
        )


def ensure_devices(shape: str | MeshShape) -> None:
    """Makes sure that JAX shows enough devices for a mesh, for programs.

    Where there are several processes, each has to have an equal part of them.

    On a host whose only backend is the CPU, missing devices are simulated and one log
    line (level INFO) says so. On a host with an accelerator nothing is simulated: too
    few devices is an error. Call it before the first JAX operation.

    Args:
      shape: "8x1" or a `MeshShape`.

    Raises:
      ValueError: if there are too few devices and none can be simulated, or they cannot be
        divided among the processes.

    Example:
      >>> ensure_devices("1x1")
    """
    mesh_shape = as_mesh_shape(shape)
    processes = process_count()
    if mesh_shape.size % processes:
        raise ValueError(
            f"the {mesh_shape.size} devices of mesh {mesh_shape} must be divided evenly"
            f" among {processes} processes. Give a multiple of {processes}"
        )
    needed = mesh_shape.size // processes
    # Which backend JAX picks is known only once it is up, too late to ask for CPU
    # devices. So ask first: with an accelerator the request changes nothing.
    asked = needed > max(1, _requested_cpu_devices())
    simulated = asked and _request_cpu_devices(needed)
    devices = jax.devices()
    if len(devices) < mesh_shape.size:
        raise ValueError(_too_few_devices(mesh_shape, devices))
    if simulated and devices[0].platform == "cpu":
        _log.info(
            "mesh %s: simulating %d devices on the CPU of this host",
            mesh_shape,
            needed,
        )


def _requested_cpu_devices() -> int:
    """JAX's setting; -1 is "not set": one device, or what XLA_FLAGS asks for."""
    return jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]


def _request_cpu_devices(count: int) -> bool:
    """Raises JAX's number of CPU devices to `count`; False if JAX is already up."""
    if _requested_cpu_devices() >= count:
        return True
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    return True


def _too_few_devices(shape: MeshShape, devices: Devices) -> str:
    platform = devices[0].platform if devices else "none"
    found = f"mesh {shape} needs {shape.size} devices, found {len(devices)}"
    smaller = f"{max(len(devices), 1)}x1"
    if platform == "cpu":
        return (
            f"{found} (platform cpu). Call simulate_cpu_devices({shape.size}) (it sets"
            " `jax_num_cpu_devices`) before the first JAX operation, or use a smaller"
            f" mesh such as {smaller}."
        )
    return (
        f"{found} (platform {platform}). Use a smaller mesh such as {smaller}, or set"
        " JAX_PLATFORMS=cpu to simulate the devices on the CPU."
    )

"""Parameters of which each device holds a part, and how a model asks for the whole.

ZeRO stage 3 keeps every parameter in parts. A model that runs its layers one after the
other asks for the parameters of a layer where it needs them, inside the function that it
gives to `shardjax.remat.scan_layers` (or to `jax.checkpoint`)::

    def block(x, layer):
        layer = gather(layer)      # the whole, in the dtype to compute in
        return x + jnp.tanh(x @ layer["w1"]) @ layer["w2"]

`gather` leaves plain arrays as they are, so the same model runs at every stage and without
any. Its gradient goes back as parts: the transpose of an all-gather is a reduce-scatter.
Parts in the host's memory are first brought to the device, those of one layer at a time;
their gradients stay on the device.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


@dataclass(frozen=True)
class PartSpec:
    """How the parts of an array make the whole. Dims are counted from the end.

    Counted so, what is said of a stack of layers holds for one layer too.

    Attributes:
      dim: that is split, negative; None for an array that each device has whole.
      axes: mesh axes that it is split over, major first.
      auto: (dim, mesh axis or axes) of what tensor parallelism splits besides.
      auto_axes: mesh axes that the compiler partitions over, if any.
      dtype: of the whole, None for that of the parts; parts are cast before they travel.
      reduce_dtype: that gradients are summed in, None for that of the parts.
    """

    dim: int | None
    axes: tuple[str, ...]
    auto: tuple[tuple[int, Any], ...] = ()
    auto_axes: tuple[str, ...] = ()
    dtype: Any = None
    reduce_dtype: Any = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["local", "stand_in"],
    meta_fields=["spec"],
)
@dataclass(frozen=True)
class Part:
    """A device's part of a parameter, inside `jax.shard_map`.

    Its gradient is that of `local`; of a part in the host's memory, whose gradient shall
    not be there, that of `stand_in`.
    """

    local: jax.Array  # this device's part, in the dtype of the parameter
    spec: PartSpec = field(compare=False)
    stand_in: jax.Array | None = None  # any numbers like `local`, on the device

    def __jax_array__(self):
        raise TypeError(
            "a parameter must be whole and on the device where it is computed with, got a"
            " device's part of"
            f" shape {self.local.shape}. Call shardjax.gather(params) on the parameters"
            " of a layer before using them, or leave the layer out of `blocks`"
        )


def is_part(x: Any) -> bool:
    """Whether `x` is a part of a parameter."""
    return isinstance(x, Part)


def gather(tree: PyTree) -> PyTree:
    """Makes parameters whole: gathers parts, leaves all else as it is.

    Args:
      tree: parameters as a loss gets them; arrays, or parts of them at ZeRO stage 3, on
        the device or in the host's memory.

    Returns:
      The same tree with an array on the device for each part.

    Example:
      >>> gather({"w": jnp.ones((2, 3))})["w"].shape
      (2, 3)
    """

    def whole(x):
        if not is_part(x):
            return x
        if x.stand_in is not None:
            return _bring_part(x.spec, x.local, x.stand_in)
        return gather_part(x.spec, to_device(x.local))

    return jax.tree.map(whole, tree, is_leaf=is_part)


def bring(x: Any) -> Any:
    """A part on the device, wherever it lies; what is no part as it is. Inside jit."""
    return replace(x, local=to_device(x.local)) if is_part(x) else x


def fetch(tree: PyTree) -> PyTree:
    """Copies arrays to the host, also those of which other processes have parts.

    For such arrays all processes must call it, at the same place of their programs.

    Args:
      tree: of arrays, wherever they lie.

    Returns:
      The same tree of NumPy arrays.

    Example:
      >>> fetch({"w": jnp.ones(2)})["w"]
      array([1., 1.], dtype=float32)
    """

    def whole(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        return replicate(x).addressable_data(0)

    return jax.device_get(jax.tree.map(whole, tree))


def replicate(tree: PyTree) -> PyTree:
    """Arrays of which each device has a part, whole on each, one after the other.

    Args:
      tree: of arrays on the devices of a mesh.

    Example:
      >>> replicate({"w": jnp.ones(2)})["w"].shape
      (2,)
    """

    def copy(x: jax.Array) -> jax.Array:
        if x.is_fully_replicated:
            return x
        sharding: Any = x.sharding
        everywhere = jax.NamedSharding(sharding.mesh, jax.P())
        return jax.block_until_ready(_copy(x, sharding=everywhere))

    return jax.tree.map(copy, tree)


@partial(jax.jit, static_argnames="sharding")
def _copy(x: jax.Array, *, sharding: jax.NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)


def place(tree: PyTree, sharding: jax.NamedSharding) -> PyTree:
    """Copies NumPy arrays to the devices of a mesh, also of other processes.

    All processes give the same arrays, whole; nothing is exchanged, nor checked.

    Args:
      tree: of arrays.
      sharding: of all of them.

    Returns:
      The same tree of `jax.Array`.

    Example:
      >>> import shardjax as sj
      >>> everywhere = jax.NamedSharding(sj.make_mesh("1x1"), jax.P())
      >>> import numpy as np
      >>> place({"x": np.ones(2)}, everywhere)["x"].shape
      (2,)
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def to_device(tree: PyTree) -> PyTree:
    """Arrays in the memory of the devices, wherever they lie; inside jit."""
    return jax.device_put(tree, jax.memory.Space.Device)


def to_host(tree: PyTree) -> PyTree:
    """Arrays in the memory of the host, wherever they lie; inside jit."""
    return jax.device_put(tree, jax.memory.Space.Host)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_part(spec: PartSpec, local: jax.Array) -> jax.Array:
    """The whole of an array; its gradient is the sum over the devices, in parts."""
    local = local if spec.dtype is None else local.astype(spec.dtype)
    dim = spec.dim
    if dim is None:
        return local

    def whole(x):
        return jax.lax.all_gather(x, spec.axes, axis=x.ndim + dim, tiled=True)

    specs = [_auto_spec(spec.auto, local.ndim)]
    return over_auto_axes(lambda x: (whole(x),), specs, spec.auto_axes)(local)[0]


def scatter_sum(
    whole: jax.Array,
    dim: int,
    axes: tuple[str, ...],
    auto: tuple[tuple[int, Any], ...] = (),
    auto_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Sums an array over the devices and keeps this device's part of the sum.

    Args:
      whole: of the same shape on each device.
      dim: to split, counted from the end.
      axes, auto, auto_axes: as of `PartSpec`.
    """

    def scatter(x):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=x.ndim + dim, tiled=True)

    specs = [_auto_spec(auto, whole.ndim)]
    return over_auto_axes(lambda x: (scatter(x),), specs, auto_axes)(whole)[0]


def over_auto_axes(fn, specs, auto_axes):
    """`fn` of arrays with these specs, made manual over the remaining mesh axes too.

    A collective over some axes of what the compiler has split over others would first
    gather it over those. The results have the specs of the arguments.
    """
    if not auto_axes:
        return fn
    specs = tuple(specs)
    return jax.shard_map(
        fn, axis_names=set(auto_axes), in_specs=specs, out_specs=specs, check_vma=False
    )


def _auto_spec(auto, ndim: int) -> jax.P:
    entries: list[Any] = [None] * ndim
    for dim, axes in auto:
        entries[dim] = axes
    return jax.P(*entries)


def _gather_forward(spec, local):
    return gather_part(spec, local), jnp.zeros((0,), local.dtype)


def _gather_backward(spec, like, grad):
    if spec.dim is None:
        return (grad.astype(like.dtype),)
    dtype = like.dtype if spec.reduce_dtype is None else spec.reduce_dtype
    part = scatter_sum(
        grad.astype(dtype), spec.dim, spec.axes, spec.auto, spec.auto_axes
    )
    return (part.astype(like.dtype),)


gather_part.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bring_part(spec: PartSpec, local: jax.Array, stand_in: jax.Array) -> jax.Array:
    """The whole of an array of the host, on the device; the gradient is `stand_in`'s.

    JAX asks for the gradient of an array of the host in the host's memory, and for none of
    an array that nothing is differentiated by. `stand_in` is not read, so the compiler
    never makes it.
    """
    return gather_part(spec, to_device(local))


def _bring_forward(spec, local, stand_in):
    return _bring_part(spec, local, stand_in), jnp.zeros((0,), stand_in.dtype)


def _bring_backward(spec, like, grad):
    return None, *_gather_backward(spec, like, grad)


_bring_part.defvjp(_bring_forward, _bring_backward)

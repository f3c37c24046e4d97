"""Flops of matrix products and convolutions, counted from the jaxpr of a function.

XLA's own `cost_analysis` counts the body of a loop once; this multiplies by its length.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


@dataclass(frozen=True)
class UnknownFlops:
    """Flops that run a number of times which the jaxpr does not tell.

    Attributes:
      where: the primitives around it from the outside in, such as ``jit:loss/while``.
      entered: how often the loop is entered, over all devices.
      flops_per_trip: flops of one trip.
    """

    where: str
    entered: int
    flops_per_trip: int


@dataclass(frozen=True)
class Flops:
    """Flops of matrix products and convolutions; a multiplication and an addition are 2.

    Attributes:
      total: flops over all devices, without `unknown`.
      per_device: flops of one device inside `jax.shard_map`, plus all that lies outside
        it, which the compiler splits only later.
      by_primitive: `total` by the name of the primitive.
      unknown: what is not in these numbers, because nobody knows how often it runs.
    """

    total: int = 0
    per_device: int = 0
    by_primitive: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[UnknownFlops, ...] = ()


def count_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Flops:
    """Counts the flops of a function's matrix products and convolutions.

    Traces the function and runs nothing. Multiplied: the length of `jax.lax.scan`, the
    trips of a `while` that counts from one literal to another, the devices of a
    `jax.shard_map`. Of a `cond` the branch with the most flops counts. A product with
    padding, or with the zeros of a dilation, is none. What remat computes again counts
    again: for `mfu` count the function without it.

    Args:
      fn: any function JAX can trace.
      *args: its arguments; `jax.ShapeDtypeStruct` will do.
      **kwargs: more of them.

    Returns:
      The flops of one call.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((8, 16)), jnp.ones((16, 32))
      >>> count_flops(jnp.matmul, x, w).total == 2 * 8 * 16 * 32
      True
      >>> count_flops(jax.grad(lambda w: (x @ w).sum()), w).by_primitive
      {'dot_general': 16384}
    """
    return count_jaxpr_flops(jax.make_jaxpr(fn)(*args, **kwargs))


def count_jaxpr_flops(jaxpr: ClosedJaxpr | Jaxpr) -> Flops:
    """Counts the flops of a jaxpr as `count_flops` does of a function.

    Args:
      jaxpr: of `jax.make_jaxpr`, or of `jax.jit(fn).trace(...)`.

    Returns:
      The flops of one evaluation.

    Raises:
      TypeError: if it is no jaxpr.

    Example:
      >>> import jax.numpy as jnp
      >>> count_jaxpr_flops(jax.make_jaxpr(jnp.dot)(jnp.ones(4), jnp.ones(4))).total
      8
    """
    if not isinstance(jaxpr, ClosedJaxpr | Jaxpr):
        raise TypeError(
            f"`jaxpr` must be a jaxpr, got {type(jaxpr).__name__} {jaxpr!r}. Give what"
            " jax.make_jaxpr(fn)(*args) returns, or call count_flops(fn, *args)."
        )
    return _count(jaxpr, frozenset(), ())


def _count(jaxpr: Any, manual: frozenset, path: tuple[str, ...]) -> Flops:
    """Counts a jaxpr inside shard_maps over the axes `manual`."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return _sum(_count_equation(eqn, manual, path) for eqn in eqns)


def _count_equation(eqn: JaxprEqn, manual: frozenset, path: tuple[str, ...]) -> Flops:
    name = eqn.primitive.name
    if name in _PRODUCTS:
        flops = _PRODUCTS[name](eqn)
        return Flops(flops, flops, {name: flops})
    path = (*path, _label(eqn))
    if name == "scan":
        body = _count(eqn.params["jaxpr"], manual, path)
        return _times(body, eqn.params["length"])
    if name == "while":
        return _count_while(eqn, manual, path)
    if name == "cond":
        branches = [_count(b, manual, path) for b in eqn.params["branches"]]
        return _largest(branches)
    if name == "shard_map":
        return _count_shard_map(eqn, manual, path)
    bodies = _sum(_count(body, manual, path) for body in _bodies(eqn))
    return bodies if name in _CALLS else _all_unknown(bodies, path)


def _count_while(eqn: JaxprEqn, manual: frozenset, path: tuple[str, ...]) -> Flops:
    test = _count(eqn.params["cond_jaxpr"], manual, path)
    body = _count(eqn.params["body_jaxpr"], manual, path)
    trips = _known_trips(eqn)
    if trips is None:
        return _all_unknown(_sum([test, body]), path)
    return _sum([_times(test, trips + 1), _times(body, trips)])


def _count_shard_map(eqn: JaxprEqn, manual: frozenset, path: tuple[str, ...]) -> Flops:
    axes = frozenset(eqn.params["newly_manual_axes"])
    devices = math.prod(eqn.params["mesh"].shape[axis] for axis in axes)
    return _times(_count(eqn.params["jaxpr"], manual | axes, path), 1, devices)


def _dot_flops(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return _products(eqn, contracted)


def _ragged_dot_flops(eqn: JaxprEqn) -> int:
    """Each row of a ragged dim belongs to one group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    flops = _products(eqn, contracted)
    if set(numbers.lhs_ragged_dimensions) <= set(contracted):
        return flops // _shape(eqn.invars[2])[-1]  # one output per group
    return flops


def _products(eqn: JaxprEqn, contracted: Iterable[int]) -> int:
    lhs = _shape(eqn.invars[0])
    sums = math.prod(lhs[dim] for dim in contracted)
    return 2 * math.prod(_shape(eqn.outvars[0])) * sums


def _conv_flops(eqn: JaxprEqn) -> int:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs = map(_shape, eqn.invars)
    out = _shape(eqn.outvars[0])
    flops = 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]]
    flops *= rhs[numbers.rhs_spec[1]]
    for i, (low, _) in enumerate(params["padding"]):
        flops *= _conv_pairs(
            lhs[numbers.lhs_spec[2 + i]],
            rhs[numbers.rhs_spec[2 + i]],
            out[numbers.out_spec[2 + i]],
            low,
            params["window_strides"][i],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
    return flops


def _conv_pairs(size, window, out, low, stride, lhs_dilation, rhs_dilation) -> int:
    """Pairs of an output and a window position along a dim that meet an input."""
    starts = np.arange(out)[:, None] * stride - low
    places = starts + np.arange(window)[None, :] * rhs_dilation
    inside = (places >= 0) & (places <= (size - 1) * lhs_dilation)
    return int(np.sum(inside & (places % lhs_dilation == 0)))


_PRODUCTS = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _conv_flops,
}

# Primitives that run what they hold once. Others with a jaxpr, such as Pallas kernels,
# are reported as unknown if there are flops in it.
_CALLS = frozenset(
    {
        "call",
        "closed_call",
        "composite",
        "compute_on",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vmap_call",
        "jit",
        "remat2",
        "xla_metadata_call",
    }
)


def _known_trips(eqn: JaxprEqn) -> int | None:
    """Trips of `while i < LIMIT: i += STEP`, all three numbers literal; else None."""
    test, body = (
        getattr(jaxpr, "jaxpr", jaxpr)
        for jaxpr in (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
    )
    before_carry = eqn.params["cond_nconsts"]
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return None
    counter, limit = test.eqns[0].invars
    if counter not in test.invars[before_carry:]:
        return None
    place = test.invars.index(counter) - before_carry
    step = _literal_step(body, eqn.params["body_nconsts"] + place, place)
    start = eqn.invars[before_carry + eqn.params["body_nconsts"] + place]
    first, last = _integer(start), _integer(limit)
    if first is None or last is None or step is None or step <= 0:
        return None
    return max(0, -(-(last - first) // step))


def _literal_step(body: Any, invar: int, outvar: int) -> int | None:
    """What the body adds to a part of its carry, if that is a literal."""
    for eqn in body.eqns:
        if body.outvars[outvar] in eqn.outvars:
            adds = eqn.primitive.name == "add" and eqn.invars[0] is body.invars[invar]
            return _integer(eqn.invars[1]) if adds else None
    return None


def _integer(atom: Any) -> int | None:
    if not isinstance(atom, Literal):
        return None
    value = np.asarray(atom.val)
    return int(value) if np.issubdtype(value.dtype, np.integer) else None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _bodies(eqn: JaxprEqn) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item


def _label(eqn: JaxprEqn) -> str:
    name = eqn.params.get("name")
    return f"{eqn.primitive.name}:{name}" if name else eqn.primitive.name


def _sum(parts: Iterable[Flops]) -> Flops:
    parts = [part for part in parts if part.total or part.unknown]
    by_primitive = Counter()
    for part in parts:
        by_primitive.update(part.by_primitive)
    return Flops(
        sum(part.total for part in parts),
        sum(part.per_device for part in parts),
        dict(by_primitive),
        tuple(unknown for part in parts for unknown in part.unknown),
    )


def _times(flops: Flops, runs: int, devices: int = 1) -> Flops:
    """What runs several times on several devices."""
    every = runs * devices
    return Flops(
        flops.total * every,
        flops.per_device * runs,
        {name: count * every for name, count in flops.by_primitive.items()},
        tuple(
            UnknownFlops(part.where, part.entered * every, part.flops_per_trip)
            for part in flops.unknown
        ),
    )


def _largest(branches: list[Flops]) -> Flops:
    """The branch with the most known flops, with what is unknown in any branch."""
    most = max(branches, key=lambda branch: branch.total)
    unknown = tuple(part for branch in branches for part in branch.unknown)
    return Flops(most.total, most.per_device, most.by_primitive, unknown)


def _all_unknown(trip: Flops, path: tuple[str, ...]) -> Flops:
    if not trip.total:
        return Flops(unknown=trip.unknown)
    here = UnknownFlops("/".join(path), 1, trip.total)
    return Flops(unknown=(here, *trip.unknown))

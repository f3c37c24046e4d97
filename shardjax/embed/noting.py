"""Which ids a function looks up, found before it is run.

A table whose lookups lie somewhere inside a model (in a loop over layers, under
`jax.checkpoint`, under `jax.vmap`) gets its ids only there. `noted_ids` traces the function
once, with a primitive in the place of each lookup, and makes of the trace a function that
returns the ids of all lookups and computes nothing else: what ids do not depend on is
removed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import batching, partial_eval

_note = Primitive("note_rows")


@_note.def_abstract_eval
def _abstract(ids, *, table, dim, dtype):
    del table
    return ShapedArray((*ids.shape, dim), jnp.dtype(dtype))


def _batch(arguments, dims, **params):
    return _note.bind(*arguments, **params), dims[0]


batching.primitive_batchers[_note] = _batch

# What calls a function as it is, once: its equations can stand in its place.
_CALLS = {
    "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "checkpoint", "jit", "pjit", "remat2",
}  # fmt: skip


def note_rows(ids: jax.Array, *, table: str, dim: int, dtype) -> jax.Array:
    """Stands for the rows [..., dim] of `ids`, int32 [...], while ids are looked for."""
    return _note.bind(ids, table=table, dim=dim, dtype=dtype)


def noted_ids(fn: Callable[..., Any], *args) -> dict[str, list[jax.Array]]:
    """The ids of all `note_rows` that a call of `fn` comes by.

    Inside a loop (`jax.lax.scan`) those of all iterations, with a leading dim of them. Of
    the branches of a `jax.lax.cond` that are not taken, -1.

    Args:
      fn: any function of pytrees of arrays.
      *args: what it would be called with.

    Returns:
      By table, arrays of ids in the order of the lookups.

    Raises:
      NotImplementedError: for a lookup inside a `while` loop or another primitive that runs
        a function of its own, and for ids that depend on looked-up rows.

    Example:
      >>> def f(x):
      ...   return note_rows(x + 1, table="a", dim=4, dtype=jnp.float32).sum()
      >>> noted_ids(f, jnp.arange(2))
      {'a': [Array([1, 2], dtype=int32)]}
    """
    closed = jax.make_jaxpr(fn)(*args)
    flat = jax.tree.leaves(args)
    names: list[str] = []

    def ids_of(*flat):
        found: _Found = []
        _evaluate(closed.jaxpr, closed.consts, flat, found)
        names.extend(name for name, _ in found)
        return [ids for _, ids in found]

    collected = jax.make_jaxpr(ids_of)(*flat)
    jaxpr, used = partial_eval.dce_jaxpr(collected.jaxpr, [True] * len(names))
    if _has_note(jaxpr):
        tables = sorted({e.params["table"] for e in _equations(jaxpr) if _is_note(e)})
        raise NotImplementedError(
            f"ids must not depend on the rows of a table, but some depend on rows of"
            f" {tables}. Look those up outside of the loss, or give that table"
            " `sparse=False`"
        )
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, collected.consts))
    kept = [x for x, keep in zip(flat, used, strict=True) if keep]
    result: dict[str, list[jax.Array]] = {}
    for name, ids in zip(names, run(*kept), strict=True):
        result.setdefault(name, []).append(ids)
    return result


_Found = list[tuple[str, jax.Array]]


def _is_note(equation) -> bool:
    return equation.primitive is _note


def _inner(equation) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    values = []
    for value in equation.params.values():
        values.extend(value if isinstance(value, list | tuple) else (value,))
    return [v for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]


def _equations(jaxpr):
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in _inner(equation):
            yield from _equations(inner)


def _has_note(jaxpr) -> bool:
    return any(map(_is_note, _equations(jaxpr)))


def _evaluate(jaxpr, consts, args, found: _Found) -> list[Any]:
    """Runs a jaxpr and adds to `found` what it notes."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(v):
        return v.val if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        if not equation.outvars:
            continue  # prints and checks happen when the function itself runs
        out = _run(equation, [read(v) for v in equation.invars], found)
        values.update(zip(equation.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _run(equation, args, found: _Found) -> Sequence[Any]:
    name = equation.primitive.name
    if _is_note(equation):
        found.append((equation.params["table"], args[0]))
    elif any(map(_has_note, _inner(equation))):
        if name == "scan":
            return _scan(equation.params, args, found)
        if name == "cond":
            return _cond(equation.params["branches"], args, found)
        if name in _CALLS:
            (inner,) = _inner(equation)
            return _evaluate(*_opened(inner), args, found)
        raise NotImplementedError(
            f"rows of a table cannot be looked up inside of {name!r}: which ids it would"
            " need cannot be found before it runs. Do the lookup before it, or use"
            " jax.lax.scan, jax.lax.cond, jax.checkpoint or jax.vmap"
        )
    params = equation.primitive.get_bind_params(equation.params)
    if isinstance(params, tuple):  # before JAX 0.10: functions apart
        args, params = [*params[0], *args], params[1]
    out = equation.primitive.bind(*args, **params)
    return out if equation.primitive.multiple_results else [out]


def _opened(jaxpr):
    if hasattr(jaxpr, "consts"):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def _scan(params, args, found: _Found) -> list[Any]:
    consts, carried = params["num_consts"], params["num_carry"]
    fixed, carry, xs = (
        args[:consts],
        args[consts : consts + carried],
        args[consts + carried :],
    )
    names: list[str] = []

    def body(carry, x):
        inner: _Found = []
        out = _evaluate(*_opened(params["jaxpr"]), [*fixed, *carry, *x], inner)
        names[:] = [name for name, _ in inner]
        return out[:carried], (out[carried:], [ids for _, ids in inner])

    carry, (ys, ids) = jax.lax.scan(
        body, list(carry), list(xs), params["length"], params["reverse"]
    )
    found.extend(zip(names, ids, strict=True))
    return [*carry, *ys]


def _cond(branches, args, found: _Found) -> list[Any]:
    index, *operands = args
    names: list[list[str]] = [[] for _ in branches]

    def run(number, *operands):
        inner: _Found = []
        out = _evaluate(*_opened(branches[number]), operands, inner)
        names[number] = [name for name, _ in inner]
        return out, [ids for _, ids in inner]

    each = [partial(run, number) for number in range(len(branches))]
    shapes = [jax.eval_shape(branch, *operands)[1] for branch in each]

    def filled(number, *operands):
        out, own = each[number](*operands)
        others = [[jnp.full(s.shape, -1, s.dtype) for s in ids] for ids in shapes]
        others[number] = own
        return out, others

    out, ids = jax.lax.switch(
        index, [partial(filled, number) for number in range(len(branches))], *operands
    )
    for branch_names, branch_ids in zip(names, ids, strict=True):
        found.extend(zip(branch_names, branch_ids, strict=True))
    return out

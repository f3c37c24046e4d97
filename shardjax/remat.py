"""Running a stack of layers, and what of it is kept for the backward pass.

What a layer computes is either kept until its gradient is due, computed once more then, or
kept in the host's memory. `scan_layers` runs the layers and takes the choice by name:

========== =======================================================================
none       everything is kept, gathered and brought parameters apart
full       only each layer's input is kept
dots       results of matrix products are kept; dots_no_batch: of those without
           batch dims
sqrt       inputs of groups of layers are kept, of sqrt(layers) layers each, and
           within a group full; sqrt:8 for groups of 8 (Chen et al. 2016);
           parameters in the host's memory come a group at a time
save:A,B   what the model has named A or B by `checkpoint_name` is kept
offload:A  what it has named A waits in the host's memory
========== =======================================================================

Whatever the choice, the result is the same up to rounding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import checkpoint_policies as policies
from jaxtyping import PyTree

from shardjax.sharded import bring, is_part

KINDS = ("none", "full", "dots", "dots_no_batch", "sqrt", "save", "offload")


@dataclass(frozen=True)
class Remat:
    """What is kept for the backward pass.

    Attributes:
      kind: one of `KINDS`.
      names: of save and offload.
      group: layers per group of sqrt, None for about the root of their number.

    Example:
      >>> Remat.parse("save:attention,mlp").names
      ('attention', 'mlp')
    """

    kind: str = "none"
    names: tuple[str, ...] = ()
    group: int | None = None

    @classmethod
    def parse(cls, text: "str | Remat") -> "Remat":
        """Reads a choice such as "full" or "save:attention".

        Raises:
          ValueError: for anything else than the forms above.
        """
        if isinstance(text, Remat):
            return text
        kind, colon, rest = str(text).partition(":")
        names = tuple(name for name in rest.split(",") if name)
        if kind in ("save", "offload") and names:
            return cls(kind, names)
        if kind == "sqrt" and colon and rest.isdecimal() and int(rest) > 0:
            return cls(kind, group=int(rest))
        if kind in KINDS and kind not in ("save", "offload") and not colon:
            return cls(kind)
        raise ValueError(
            "`remat` must be one of none, full, dots, dots_no_batch, sqrt, sqrt:LAYERS,"
            f" save:NAME,... or offload:NAME,..., got {text!r}"
        )


def scan_layers(
    body: Callable[[Any, PyTree], Any],
    carry: Any,
    stacked: PyTree,
    *,
    remat: str | Remat = "none",
) -> Any:
    """Runs layers one after the other, as one compiled loop.

    Args:
      body: `body(carry, layer) -> carry`, one layer; `layer` are its parameters, which
        it makes whole by `shardjax.gather`.
      carry: what goes through the layers; shapes and dtypes stay the same.
      stacked: parameters of all layers; each leaf has a leading dim of the layers.
      remat: what is kept for the backward pass, see the module.

    Returns:
      The carry after the last layer.

    Raises:
      ValueError: for leaves without a common leading dim, for a name that no layer
        gives, for the offload of a layer's result (which would do nothing: name its
        input), or for groups that do not divide the layers.

    Example:
      >>> import jax.numpy as jnp
      >>> float(scan_layers(lambda x, w: x * w, 1.0, jnp.array([2.0, 3.0]), remat="full"))
      6.0
    """
    choice = Remat.parse(remat)
    layers = _count_layers(stacked)
    _check_names(choice, body, carry, stacked)

    def run(fn, carry, stacked):
        return jax.lax.scan(lambda c, layer: (fn(c, layer), None), carry, stacked)[0]

    if choice.kind != "sqrt":
        return run(_checkpoint(choice, body, stacked), carry, stacked)
    size = _group_size(layers, choice.group)

    def grouped(x):
        return x.reshape(layers // size, size, *x.shape[1:])

    inner = jax.checkpoint(body, prevent_cse=False)

    def group(carry, stacked):
        # TPUs' compiler cannot slice an array of the host by group and layer
        return run(inner, carry, jax.tree.map(bring, stacked, is_leaf=is_part))

    outer = jax.checkpoint(group, prevent_cse=False)
    return run(outer, carry, jax.tree.map(grouped, stacked))


def _count_layers(stacked) -> int:
    shapes = [x.shape for x in jax.tree.leaves(stacked)]
    counts = {shape[0] if shape else None for shape in shapes}
    if len(counts) != 1 or None in counts:
        raise ValueError(
            "the leaves of `stacked` must have one leading dim of the layers, got shapes"
            f" {sorted(set(shapes))}. Stack the parameters of the layers with jnp.stack"
        )
    return int(shapes[0][0])


def _group_size(layers: int, group: int | None) -> int:
    divisors = [n for n in range(1, layers + 1) if layers % n == 0]
    if group is None:
        return min(divisors, key=lambda n: abs(n - math.sqrt(layers)))
    if group not in divisors:
        raise ValueError(
            f"the groups of remat 'sqrt:{group}' must divide the {layers} layers. Give one"
            f" of {divisors}"
        )
    return group


def _checkpoint(choice: Remat, body, stacked):
    """`body` with what it keeps; inside a loop nothing else can be shared by mistake."""
    if choice.kind == "none" and not any(
        map(is_part, jax.tree.leaves(stacked, is_leaf=is_part))
    ):
        return body
    return jax.checkpoint(body, policy=_policy(choice), prevent_cse=False)


def _policy(choice: Remat):
    if choice.kind == "none":
        return _all_but_params
    if choice.kind == "save":
        return policies.save_only_these_names(*choice.names)
    if choice.kind == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(choice.names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return {
        "full": policies.nothing_saveable,
        "dots": policies.dots_saveable,
        "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
    }[choice.kind]


def _all_but_params(primitive, *_, **params) -> bool:
    """Keeps everything but what gathers parameters, or brings them from the host, which is
    done once more."""
    jaxpr = params.get("call_jaxpr") or params.get("jaxpr")
    inner = () if jaxpr is None else equations(jaxpr)
    names = {primitive.name, *(e.primitive.name for e in inner)}
    return not names & {"all_gather", "device_put"}


def equations(jaxpr) -> Iterator[Any]:
    """All equations of a jaxpr, those inside of others too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            values = value if isinstance(value, list | tuple) else (value,)
            for inner in values:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


def _check_names(choice: Remat, body, carry, stacked) -> None:
    """Finds names that would have no effect."""
    if not choice.names:
        return
    layer = jax.tree.map(lambda x: x[0], stacked)
    jaxpr = jax.make_jaxpr(body)(carry, layer)
    named: dict[str, list] = {}
    for equation in equations(jaxpr):
        if equation.primitive.name == "name":
            named.setdefault(equation.params["name"], []).extend(equation.outvars)
    unknown = [name for name in choice.names if name not in named]
    if unknown:
        raise ValueError(
            f"remat '{choice.kind}' names {unknown}, but a layer names only"
            f" {sorted(named)}. Give one of these, or name values in the layer with"
            " jax.ad_checkpoint.checkpoint_name(x, NAME)"
        )
    results = set(map(id, jaxpr.jaxpr.outvars))
    for name in choice.names if choice.kind == "offload" else ():
        if any(id(v) in results for v in named[name]):
            raise ValueError(
                f"remat 'offload:{name}' names a layer's result, which has no effect:"
                " XLA keeps it on the device as the next layer's input. Name the layer's"
                " input instead, at its beginning"
            )

"""What a plan takes: bytes on each device, bytes over the wire, as numbers and as a table."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardjax.partition import entry_axes
from shardjax.zero.offload import find_others, find_stacks
from shardjax.zero.plan import LeafPlan, ZeroPlan, itemsize


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device.

    Attributes:
      params: between steps, as far as they lie on the devices.
      grads: accumulated over microbatches, before the optimizer takes them.
      opt_state: of the optimizer, as far as it lies on the devices.
      gathered: parameters made whole for a while at stage 3: of one layer of the blocks,
        and of everything outside of them; with what is brought from the host for that.
      streamed: what is offloaded, state or state and parameters, on the device for a while
        in the update, old and new: of one layer of the blocks, or of everything outside of
        them, whichever is more.
      host: bytes in the host's memory for this device: offloaded state and parameters.
      host_params: those of them that are parameters.
      added: gradients of one microbatch, beside `grads`, to which they are added; 0 for a
        step without microbatches.
    """

    params: int
    grads: int
    opt_state: int
    gathered: int
    streamed: int = 0
    host: int = 0
    host_params: int = 0
    added: int = 0

    @property
    def total(self) -> int:
        """All on the device; activations and temporaries of the compiler come on top."""
        used = self.params + self.grads + self.opt_state
        return used + max(self.gathered + self.added, self.streamed)


@dataclass(frozen=True)
class WirePrediction:
    """Bytes that each device sends in a step, by collective, as on a ring.

    A ring of n devices sends (n - 1) / n of an array to gather it or to scatter its sum, and
    twice that to reduce it on all (Rajbhandari et al. 2020, section 7).
    """

    all_reduce: float
    reduce_scatter: float
    all_gather: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.all_reduce + self.reduce_scatter + self.all_gather


def estimate_memory(plan: ZeroPlan, microbatches: int = 1) -> MemoryEstimate:
    """Bytes per device of what a plan keeps, exact for what it places.

    Args:
      plan: where everything lies.
      microbatches: of the step.

    Example:
      >>> import optax, shardjax as sj
      >>> from shardjax import zero
      >>> plan = zero.plan_zero({"w": np.ones((8, 2), "f")}, optax.adam(1e-3),
      ...                       sj.make_mesh("1x1"), 1)
      >>> estimate_memory(plan).params
      64
    """
    params = sum(_param_bytes(plan, p) for p in plan.leaves if not p.on_host)
    host_params = sum(_param_bytes(plan, p) for p in plan.leaves if p.on_host)
    grads = sum(
        _local_bytes(plan, p.shape, p.dtype, _grad_spec(plan, p))
        for p in plan.leaves
        if p.trained
    )
    opt_state, streamed, host = _state_bytes(plan)
    return MemoryEstimate(
        params,
        grads,
        opt_state,
        _gathered_bytes(plan),
        streamed,
        host + host_params,
        host_params,
        grads if microbatches > 1 else 0,
    )


def predict_wire_bytes(
    plan: ZeroPlan, microbatches: int = 1, gathers: int = 2
) -> WirePrediction:
    """Bytes that each device sends for gradients and parameters in one step.

    Those of tensor parallelism, which depend on the activations, are not counted, nor the
    few numbers of the loss and of norms.

    Args:
      plan: where everything lies.
      microbatches: of the step.
      gathers: how often a layer of the blocks is gathered per microbatch at stage 3: in the
        forward and in the backward pass; 3 with remat "sqrt".
    """
    n = plan.parts
    ring = (n - 1) / n
    reduce, scatter, gather = 0.0, 0.0, 0.0
    for leaf in plan.leaves:
        if not leaf.trained:
            continue
        summed = _wire_size(plan, leaf, plan.precision.reduce or leaf.dtype)
        if leaf.part is None or plan.stage == 0:
            reduce += 2 * ring * summed
        elif leaf.in_block:
            moved = _wire_size(plan, leaf, plan.precision.compute or leaf.dtype)
            scatter += ring * summed * microbatches
            gather += ring * moved * microbatches * gathers
        else:
            scatter += ring * summed * (microbatches if plan.stage == 2 else 1)
            compute = plan.precision.compute if plan.stage == 3 else None
            gather += ring * _wire_size(plan, leaf, compute or leaf.dtype)
    return WirePrediction(reduce, scatter, gather)


def explain(plan: ZeroPlan, microbatches: int = 1) -> str:
    """The plan as a table: where each parameter lies and why, and what it all takes.

    Args:
      plan: where everything lies.
      microbatches: of the step.
    """
    head = ("parameter", "shape", "between steps", "updated as", "why")
    rows = [head] + [
        (
            p.path,
            f"{jnp.dtype(p.dtype).name if p.trained else p.dtype}{list(p.shape)}",
            _spec_text(p.spec) + (", host" if p.on_host else ""),
            _spec_text(p.split_spec),
            p.reason + (", gathered in its layer" if p.in_block else ""),
        )
        for p in plan.leaves
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    memory = estimate_memory(plan, microbatches)
    wire = predict_wire_bytes(plan, microbatches)
    sizes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    total = sum(p.nbytes for p in plan.leaves if p.trained)
    whole = sum(p.nbytes for p in plan.leaves if p.trained and p.part is None)
    return "\n".join(
        [
            f"ZeRO stage {plan.stage} over {'x'.join(plan.axes)} on {sizes}",
            *lines,
            f"bytes per device: params {memory.params:,}, grads {memory.grads:,}"
            + (f" and {memory.added:,} of a microbatch" if memory.added else "")
            + f", opt_state {memory.opt_state:,}, gathered for a while {memory.gathered:,}",
            *([] if not plan.offloaded else [_host_line(memory)]),
            f"bytes sent per device and step: {wire.total:,.0f} (all-reduce"
            f" {wire.all_reduce:,.0f}, reduce-scatter {wire.reduce_scatter:,.0f},"
            f" all-gather {wire.all_gather:,.0f})",
            f"kept whole: {whole / max(total, 1):.2%} of {total:,} bytes of parameters",
        ]
    )


def _host_line(memory: MemoryEstimate) -> str:
    params = f"params {memory.host_params:,}, " if memory.host_params else ""
    return (
        f"bytes in the host's memory per device: {params}opt_state"
        f" {memory.host - memory.host_params:,}, of which streamed through the device"
        f" {memory.streamed:,} at a time"
    )


def _spec_text(spec: PartitionSpec) -> str:
    entries = ["x".join(entry_axes(e)) or "-" for e in spec]
    return "whole" if set(entries) <= {"-"} else "[" + ", ".join(entries) + "]"


def _grad_spec(plan: ZeroPlan, leaf: LeafPlan) -> PartitionSpec:
    """Where the accumulated gradient lies."""
    if plan.stage == 2 or leaf.in_block:
        return leaf.split_spec
    return PartitionSpec(
        *[None if set(entry_axes(e)) & set(plan.axes) else e for e in leaf.spec]
    )


def _state_bytes(plan: ZeroPlan) -> tuple[int, int, int]:
    """Bytes of the optimizer's state: on the device, on the host, and between them what is
    there for a while, with the parameters that come with it."""
    specs = jax.tree.leaves(
        plan.opt_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    states = jax.tree.leaves(plan.abstract_opt_state)
    sizes = [
        _local_bytes(plan, x.shape, x.dtype, s)
        for x, s in zip(states, specs, strict=True)
    ]
    if not plan.offloaded:
        return sum(sizes), 0, 0
    kept, shared = plan.offloaded.split(jax.tree.unflatten(plan.offloaded.state, sizes))
    of_param = [sum(k) for k in kept]
    trained = [p for p in plan.leaves if p.trained]
    moved = [
        size + (_param_bytes(plan, p) if p.on_host else 0)
        for size, p in zip(of_param, trained, strict=True)
    ]
    pieces = [sum(moved[i] for i in find_others(plan))] + [
        sum(moved[i] for i in members) // layers
        for layers, members in find_stacks(plan).items()
    ]
    return sum(shared), 2 * max(pieces), sum(of_param)


def _gathered_bytes(plan: ZeroPlan) -> int:
    if plan.stage != 3:
        return 0
    layer = whole = 0
    for p in plan.leaves:
        size = _param_bytes(plan, p) if p.on_host else 0
        if p.part is not None:
            size += _wire_size(plan, p, plan.precision.compute or p.dtype)
        if p.in_block or p.streamed:
            layer += size // p.shape[0]
        else:
            whole += size
    return int(layer + whole)


def _wire_size(plan: ZeroPlan, leaf: LeafPlan, dtype) -> float:
    """Bytes of a leaf in `dtype` along the axes of data parallelism: a device's share of
    what tensor parallelism splits."""
    parts = _spec_parts(plan, [e for e in leaf.split_spec])
    if leaf.part is not None and plan.stage:
        parts //= plan.parts
    return int(np.prod(leaf.shape)) * itemsize(dtype) / parts


def _param_bytes(plan: ZeroPlan, leaf: LeafPlan) -> int:
    """Bytes of a device's part between steps."""
    return _local_bytes(plan, leaf.shape, leaf.dtype, leaf.spec)


def _local_bytes(plan: ZeroPlan, shape, dtype, spec) -> int:
    return int(np.prod(shape)) * itemsize(dtype) // _spec_parts(plan, spec)


def _spec_parts(plan: ZeroPlan, entries) -> int:
    return int(np.prod([plan.mesh.shape[a] for e in entries for a in entry_axes(e)]))

"""What the devices send each other, read from the text of a compiled program."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardjax.profiling.groups import (
    Groups,
    permuted_groups,
    replica_groups,
    spanned_axes,
)
from shardjax.profiling.hlo import (
    Instruction,
    Program,
    Runs,
    count_runs,
    parse_program,
    shape_bytes,
    tuple_shapes,
)

CROSS_SLICE = "cross-slice"

# Bytes that a device of a ring of n sends, from those of the operand and the result.
_SENT = {
    "all-gather": lambda n, operand, result: (n - 1) / n * result,
    "all-reduce": lambda n, operand, result: 2 * (n - 1) / n * result,
    "all-to-all": lambda n, operand, result: (n - 1) / n * result,
    "collective-broadcast": lambda n, operand, result: result if n > 1 else 0,
    "collective-permute": lambda n, operand, result: result if n > 1 else 0,
    "ragged-all-to-all": lambda n, operand, result: (n - 1) / n * operand,
    "reduce-scatter": lambda n, operand, result: (n - 1) * result,
}

# Of these, what starts an asynchronous pair has the shape of the result alone.
_RESULT_ONLY = ("all-reduce-start",)

# What follows the first operand of these is a token, or a buffer and offsets.
_FIRST_ONLY = ("send", "ragged-all-to-all")

# TPUs run a collective bit by bit inside of what they compute meanwhile. Each of these
# fusions names all of it, and only the one that starts it has a -1.
_LATER_BIT = re.compile(r'"async_collective_fusion_config":\{"flag_start":"(?!-1")')

_SLICES = re.compile(r'megascale_target="\{([\d,]+)\}x')


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: such as ``all-gather``; ``cross-slice`` for what TPU slices send each other.
      name: of the instruction.
      operand_bytes: bytes of what one device puts in, once.
      result_bytes: bytes of what one device gets, once.
      group_size: devices that take part together; of ``cross-slice`` the slices.
      groups: which devices, by their place in the mesh's order; of a permute those that
        its pairs connect; of ``cross-slice`` not known, so empty.
      axes: names of the mesh axes that the groups span; None without a mesh.
      times: how often it runs in one run of the program; None if a loop around it has
        an unknown number of trips.
      conditional: whether it is in a branch and may run less often than `times`.
      bytes_sent: bytes a device sends each time, if the group forms a ring. It is the
        most that it can be for ``ragged-all-to-all``, whose sizes only the run knows;
        for ``cross-slice`` what goes to the network of the slices.
    """

    kind: str
    name: str
    operand_bytes: int
    result_bytes: int
    group_size: int
    groups: Groups
    axes: tuple[str, ...] | None
    times: int | None
    conditional: bool
    bytes_sent: float


@dataclass(frozen=True)
class WireBytes:
    """Bytes that a device sends in one run of a program.

    Attributes:
      total: bytes, without `unknown`; branches count as if all of them ran.
      by_kind: `total` by kind of collective.
      by_group_size: `total` by the size of the group.
      by_axes: `total` by the mesh axes that the groups span; empty without a mesh.
      unknown: collectives in loops of unknown length.
    """

    total: float
    by_kind: Mapping[str, float]
    by_group_size: Mapping[int, float]
    by_axes: Mapping[tuple[str, ...], float]
    unknown: tuple[Collective, ...]


def collectives(program: Any, *, devices: int | Mesh) -> list[Collective]:
    """Finds all collectives of a compiled program.

    An asynchronous pair is one collective, and so is one of several arrays, or one that
    TPUs run bit by bit inside of other fusions. On TPUs a fused all-reduce that only keeps
    a part of its result is a reduce-scatter.

    Args:
      program: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.
      devices: the mesh it was compiled for, or how many devices; a mesh also tells
        which of its axes a group spans.

    Returns:
      The collectives that the program can reach, in its order.

    Raises:
      TypeError: if `program` has no text, or `devices` is neither a mesh nor a number.
      ValueError: if the text is not that of a program, `devices` is not positive, or
        smaller than a device of a group.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
      >>> collectives(compiled, devices=1)
      []
    """
    parsed = parse_program(_text(program))
    count = _device_count(devices)
    runs = count_runs(parsed)
    found = [
        _collective(parsed, name, instruction, runs[name], count)
        for name, instructions in parsed.computations.items()
        for instruction in instructions.values()
        if runs[name].times != 0 and _kind(name, instruction)
    ]
    if isinstance(devices, Mesh):
        return [replace(c, axes=spanned_axes(c.groups, devices)) for c in found]
    return found


def wire_bytes(found: Iterable[Collective]) -> WireBytes:
    """Sums what a device sends in one run of a program, all devices in rings.

    Args:
      found: of `collectives`, all or those of interest.

    Returns:
      Bytes per device, in all and by kind, size of the group and mesh axes.

    Example:
      >>> wire_bytes([]).total
      0.0
    """
    found = list(found)
    known = [one for one in found if one.times is not None]
    return WireBytes(
        total=float(sum(_all_sent(one) for one in known)),
        by_kind=_sum_by(known, lambda one: one.kind),
        by_group_size=_sum_by(known, lambda one: one.group_size),
        by_axes=_sum_by([c for c in known if c.axes is not None], lambda one: one.axes),
        unknown=tuple(one for one in found if one.times is None),
    )


def _all_sent(one: Collective) -> float:
    return one.bytes_sent * (one.times or 0)


def _sum_by(found: list[Collective], key: Callable[[Collective], Any]) -> dict:
    sums = defaultdict(float)
    for one in found:
        sums[key(one)] += _all_sent(one)
    return dict(sums)


def _kind(computation: str, instruction: Instruction) -> str | None:
    if _LATER_BIT.search(instruction.attributes):
        return None
    kind = instruction.opcode.removesuffix("-start")
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        return "reduce-scatter"  # a TPU's fusion: what follows keeps one part
    if kind == "send" and "megascale" in instruction.attributes.lower():
        return CROSS_SLICE
    return kind if kind in _SENT else None


def _collective(
    program: Program, computation: str, instruction: Instruction, runs: Runs, count: int
) -> Collective:
    kind = _kind(computation, instruction) or ""
    operand, result = _sizes(program.computations[computation], instruction)
    groups, size = _groups(kind, instruction, count)
    if kind == "reduce-scatter":
        result = operand // size  # a fused one has yet to cut its part out
    if kind == CROSS_SLICE:
        result = sent = operand
    else:
        sent = _SENT[kind](size, operand, result)
    return Collective(
        kind=kind,
        name=instruction.name,
        operand_bytes=operand,
        result_bytes=result,
        group_size=size,
        groups=groups,
        axes=None,
        times=runs.times,
        conditional=runs.conditional,
        bytes_sent=float(sent),
    )


def _sizes(
    instructions: Mapping[str, Instruction], instruction: Instruction
) -> tuple[int, int]:
    """Bytes of the operands and of the result."""
    names, shape = instruction.operands, instruction.shape
    if instruction.opcode.startswith(_FIRST_ONLY):
        names = names[:1]
    if instruction.opcode.endswith("-start") and instruction.opcode not in _RESULT_ONLY:
        shape = tuple_shapes(shape)[1]
    operand = sum(shape_bytes(instructions[name].shape) for name in names)
    return operand, shape_bytes(shape)


def _groups(kind: str, instruction: Instruction, count: int) -> tuple[Groups, int]:
    """The groups and the size of the largest."""
    if kind == CROSS_SLICE:
        target = _SLICES.search(instruction.attributes)
        return (), len(target[1].split(",")) if target else 0
    if kind == "collective-permute":
        groups = permuted_groups(instruction.attributes, count)
    else:
        groups = replica_groups(instruction.attributes, count)
    return groups, max((len(group) for group in groups), default=1)


def _text(program: Any) -> str:
    if isinstance(program, str):
        return program
    if hasattr(program, "as_text"):
        return program.as_text()
    raise TypeError(
        "`program` must be a compiled program or its text, got"
        f" {type(program).__name__} {program!r}. Give"
        " jax.jit(fn).lower(...).compile()."
    )


def _device_count(devices: Any) -> int:
    if isinstance(devices, Mesh):
        return devices.devices.size
    if isinstance(devices, bool) or not isinstance(devices, int | np.integer):
        raise TypeError(
            "`devices` must be the mesh or the number of devices, got"
            f" {type(devices).__name__} {devices!r}. Give the mesh that the program was"
            " compiled for."
        )
    if devices < 1:
        raise ValueError(f"`devices` must be positive, got {devices}. Give 1 or more.")
    return int(devices)

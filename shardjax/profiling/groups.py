"""Which devices a collective joins: the forms in which XLA writes groups."""

import math
import re

import numpy as np
from jax.sharding import Mesh

from shardjax.profiling.hlo import split_top

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"\{\}|\{\{.*?\}\}")
_MESH = re.compile(r"mesh\[(.*?)\](?:, *device_ids=\((.*?)\))? *\{(.*?)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+))?")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str, devices: int) -> Groups:
    """Reads the groups of a collective.

    Args:
      attributes: of the instruction, with ``replica_groups=`` in one of the forms
        ``{{0,1},{2,3}}``, ``{}`` (all), ``[2,4]<=[4,2]T(1,0)`` and
        ``mesh['a'=2,'b'=4] {'b'}``.
      devices: how many the program runs on.

    Returns:
      Devices per group, by their place in the program's order.

    Raises:
      ValueError: if the form is another, or a device is beyond `devices`.

    Example:
      >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
      ((0, 2), (1, 3))
      >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)
      ((0, 1), (2, 3))
    """
    text = attributes.partition("replica_groups=")[2]
    if match := _IOTA.match(text):
        rows = _iota(match[2], match[3]).reshape(_numbers(match[1]))
        return _checked(_as_groups(rows), devices)
    if match := _MESH.match(text):
        return _checked(_mesh_groups(match[1], match[2], match[3]), devices)
    if match := _LISTED.match(text):
        if match[0] == "{}":
            return (tuple(range(devices)),)
        return _checked(_listed(match[0]), devices)
    raise ValueError(
        "replica_groups must read {{0,1},{2,3}}, [2,4]<=[8] or mesh['a'=2,'b'=4] {'a'},"
        f" got {text[:60]!r}. Report the text: this version of XLA writes a new form."
    )


def permuted_groups(attributes: str, devices: int) -> Groups:
    """Reads which devices a collective-permute joins.

    Args:
      attributes: of the instruction, with ``source_target_pairs={{0,1},{1,0}}``.
      devices: how many the program runs on.

    Returns:
      The devices that pairs connect, directly or through others.

    Raises:
      ValueError: if a device is beyond `devices`.

    Example:
      >>> permuted_groups("source_target_pairs={{0,2},{2,0},{1,3},{3,1}}", 4)
      ((0, 2), (1, 3))
    """
    text = attributes.partition("source_target_pairs=")[2]
    match = _LISTED.match(text)
    groups: list[set[int]] = []
    for pair in _checked(_listed(match[0] if match else ""), devices):
        joined = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in joined]
        groups.append(set(pair).union(*joined))
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def spanned_axes(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Names the mesh axes along which the devices of some group differ.

    Args:
      groups: devices by their place in the mesh's order.
      mesh: the mesh.

    Returns:
      Axis names in the order of the mesh; empty if each group is one device.

    Example:
      >>> import shardjax as sj
      >>> spanned_axes(((0,),), sj.make_mesh("1x1"))
      ()
    """
    shape = mesh.devices.shape
    spanned = np.zeros(len(shape), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        spanned |= (places != places[:, :1]).any(axis=1)
    return tuple(n for n, s in zip(mesh.axis_names, spanned, strict=True) if s)


def _listed(text: str) -> Groups:
    return tuple(_numbers(row) for row in re.findall(r"\{([\d,]+)\}", text))


def _mesh_groups(axes: str, order: str | None, chosen: str) -> Groups:
    """Groups along some axes of a mesh, or along parts ``'a':(before)size`` of them."""
    sizes = {}
    for axis in axes.split(","):
        name, _, size = axis.rpartition("=")
        sizes[name.strip(" '")] = int(size)
    picked = [_part(part, sizes) for part in split_top(chosen)]
    # One dim per part of an axis: it is cut where a chosen part begins or ends.
    dims = []
    for name, size in sizes.items():
        ends = [end for axis, *bounds in picked if axis == name for end in bounds]
        cuts = sorted({1, size, *ends})
        dims += [(name, cut, after) for cut, after in zip(cuts, cuts[1:], strict=False)]
    inside = [
        dim
        for axis, start, end in picked
        for dim, (name, before, after) in enumerate(dims)
        if name == axis and start <= before and after <= end
    ]
    outside = [dim for dim in range(len(dims)) if dim not in inside]
    grid = _order(order, math.prod(sizes.values()))
    grid = grid.reshape([after // before for _, before, after in dims])
    group_size = math.prod(grid.shape[dim] for dim in inside)
    return _as_groups(grid.transpose(outside + inside).reshape(-1, group_size))


def _part(text: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """An axis, and between which products of its factors the part lies."""
    match = _AXIS.match(text)
    if match is None or match[1] not in sizes:
        raise ValueError(
            f"a group must be along the axes {tuple(sizes)} of its mesh, got {text!r}."
            " Report the text: this version of XLA writes a new form."
        )
    if match[2] is None:
        return match[1], 1, sizes[match[1]]
    return match[1], int(match[2]), int(match[2]) * int(match[3])


def _order(text: str | None, devices: int) -> np.ndarray:
    """The devices of a mesh that says in which order it holds them, or does not."""
    if not text:
        return np.arange(devices)
    if match := _ORDER.match(text):
        return _iota(match[1], match[2]).reshape(-1)
    return np.array(_numbers(text))


def _iota(dims: str, transposed: str | None) -> np.ndarray:
    sizes = _numbers(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(transposed)) if transposed else ids


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in rows)


def _checked(groups: Groups, devices: int) -> Groups:
    last = max((device for group in groups for device in group), default=0)
    if last >= devices:
        raise ValueError(
            f"`devices` must count all devices of the program, got {devices}, but a"
            f" group has device {last}. Give the mesh it was compiled for."
        )
    return groups

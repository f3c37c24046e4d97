"""Where every parameter, gradient and optimizer state lies, before anything is allocated.

ZeRO (Rajbhandari et al. 2020) splits what data parallelism keeps on every device:

===== ============================ ================================ ====================
stage split over the devices       collectives of a step            bytes sent, of DP's
===== ============================ ================================ ====================
0     nothing                      all-reduce gradients             1
1     optimizer state              reduce-scatter gradients,        1
                                   all-gather parameters
2     and accumulated gradients    reduce-scatter per microbatch,   1 (M microbatches:
                                   all-gather parameters            (M + 1) / 2)
3     and parameters               all-gather where used, forward   1.5 for layers in
                                   and backward, reduce-scatter     `blocks`, else 1
===== ============================ ================================ ====================

Every leaf is split along one dim of its own, never as part of a flat buffer, so that a
leaf's place depends on that leaf alone. Dims that tensor parallelism splits (`rules`) are
left to it. A leaf of which no dim divides stays whole, and the plan says so.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from shardjax.mesh import DATA_AXIS, make_mesh
from shardjax.partition import (
    Rules,
    check_patterns,
    check_sequence,
    check_specs,
    entry_axes,
    leaf_path,
    make_spec,
    match_specs,
)
from shardjax.precision import Precision
from shardjax.sharded import PartSpec
from shardjax.zero.opt_state import opt_state_specs
from shardjax.zero.piecewise import Piecewise, split_piecewise

STAGES = (0, 1, 2, 3)
OFFLOADS = ("none", "opt_state", "all")


@dataclass(frozen=True)
class LeafPlan:
    """Where one parameter lies, with its gradient and what the optimizer keeps for it.

    Attributes:
      path: of the leaf, as rules see it.
      shape, dtype: of the whole.
      spec: of the parameter between steps.
      split_spec: of what is split at this stage: the optimizer's state and its update.
      part: how the parts of a split leaf make the whole; None for a leaf kept whole.
      in_block: whether the loss gets it in parts at stage 3 and gathers it itself.
      stacked: whether its leading dim is that of layers, which nothing splits.
      trained: False for leaves that are no floats, which the optimizer never sees.
      reason: why it lies so.
      on_host: whether it is in the host's memory between steps.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    split_spec: PartitionSpec
    part: PartSpec | None
    in_block: bool
    stacked: bool
    trained: bool
    reason: str
    on_host: bool = False

    @property
    def streamed(self) -> bool:
        """Whether it is brought from the host's memory a layer at a time."""
        return self.on_host and self.stacked and self.shape[0] > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return int(np.prod(self.shape)) * itemsize(self.dtype)


@dataclass(frozen=True)
class ZeroPlan:
    """Where everything lies; plain data, made by `plan_zero`.

    Attributes:
      mesh: the devices.
      stage: 0 to 3.
      axes: mesh axes of data parallelism, that the batch and ZeRO split over.
      auto_axes: other mesh axes with more than one device: tensor parallelism's, over
        which the compiler partitions.
      leaves: a `LeafPlan` per parameter, in the order of the tree.
      treedef: of the parameters.
      opt_specs: a PartitionSpec per leaf of the optimizer's state.
      abstract_opt_state: its shapes and dtypes.
      precision: dtypes to store, compute and reduce in.
      offloaded: the optimizer, if the host keeps its state between steps.
      offload: what the host keeps, one of `OFFLOADS`.
    """

    mesh: Mesh
    stage: int
    axes: tuple[str, ...]
    auto_axes: tuple[str, ...]
    leaves: tuple[LeafPlan, ...]
    treedef: Any
    opt_specs: PyTree
    abstract_opt_state: PyTree
    precision: Precision
    offloaded: Piecewise | None = None
    offload: str = "none"

    @property
    def parts(self) -> int:
        """Devices along the axes of data parallelism."""
        return int(np.prod([self.mesh.shape[axis] for axis in self.axes]))

    def tree(self, values) -> PyTree:
        """A tree like the parameters with one value per leaf."""
        return jax.tree.unflatten(self.treedef, list(values))

    @property
    def abstract_trained(self) -> PyTree:
        """Shapes and dtypes of what is trained, None for other parameters."""
        return self.tree(
            jax.ShapeDtypeStruct(p.shape, p.dtype) if p.trained else None
            for p in self.leaves
        )

    @property
    def param_specs(self) -> PyTree:
        """A PartitionSpec per parameter, between steps."""
        return self.tree(leaf.spec for leaf in self.leaves)


def plan_zero(
    abstract_params: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    stage: int,
    rules: Rules = (),
    *,
    axes: Sequence[str] = (DATA_AXIS,),
    blocks: Sequence[str] = (),
    min_bytes: int = 4096,
    precision: "Precision | str" = "f32",
    tolerance: float | None = None,
    offload: str = "none",
) -> ZeroPlan:
    """Plans where parameters, gradients and optimizer state lie.

    Allocates nothing.

    Args:
      abstract_params: the parameters or their shapes (`jax.eval_shape`); any tree of
        arrays. Leaves that are no floats are kept as they are and not trained.
      tx: the optimizer, any optax transformation.
      mesh: of `shardjax.make_mesh`; one with Explicit axes is made anew with Auto ones.
      stage: 0, 1, 2 or 3.
      rules: ordered pairs of a pattern for paths and a PartitionSpec, for tensor
        parallelism: axes besides `axes`. A rule may also name all of `axes` in one dim, to
        say which dim ZeRO splits.
      axes: mesh axes that the batch is split over.
      blocks: patterns of paths of the layers' stacked parameters: at stage 3 the loss gets
        those in parts, and calls `shardjax.gather` in each layer. Their leading dim is the
        layers'. All other parameters are gathered once per step.
      min_bytes: smaller leaves stay whole.
      precision: dtypes; a `Precision` or its name.
      tolerance: share of the parameters' bytes that may stay whole where the stage would
        split them; None for any.
      offload: what is in the host's memory (pinned_host) between steps: "none", the
        optimizer's state ("opt_state"), or that and the trained parameters ("all", at stage
        3). What belongs to `blocks` is on the devices a layer at a time, in the forward
        pass, the backward pass and the update; all else at once, where it is needed.
        Gradients are on the devices.

    Raises:
      TypeError: for `rules`, `axes` or `blocks` that are no sequence, such as a string.
      ValueError: for an unknown stage, axis or offload, parameters to offload below stage
        3, a rule or block pattern that matches no leaf, a spec that does not fit, or more
        than `tolerance` left whole; `PiecewiseError` for an optimizer that cannot be offloaded.

    Example:
      >>> import shardjax as sj
      >>> plan = plan_zero({"w": np.ones((8, 2))}, optax.adam(1e-3), sj.make_mesh("1x1"), 2)
      >>> plan.leaves[0].reason
      'whole: one device along data'
    """
    precision = Precision.parse(precision)
    if stage not in STAGES or isinstance(stage, bool):
        raise ValueError(f"`stage` must be one of {STAGES}, got {stage!r}")
    if not isinstance(min_bytes, int) or min_bytes < 0:
        raise ValueError(f"`min_bytes` must be 0 or more bytes, got {min_bytes!r}")
    if tolerance is not None and not (
        isinstance(tolerance, int | float) and 0 <= tolerance <= 1
    ):
        raise ValueError(f"`tolerance` must be in [0, 1] or None, got {tolerance!r}")
    check_offload(offload, stage)
    check_sequence("axes", axes)
    mesh, axes = make_mesh(mesh), tuple(axes)
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown or not axes:
        raise ValueError(
            f"`axes` must name axes of the mesh, {mesh.axis_names}, got {axes}"
        )
    abstract_params = jax.eval_shape(lambda tree: tree, abstract_params)
    named = [
        (leaf_path(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params)
    ]
    specs = match_specs(abstract_params, rules)
    paths = [path for path, _ in named]
    check_patterns("rules", [pattern for pattern, _ in rules], paths)
    check_patterns("blocks", blocks, paths)
    check_specs(abstract_params, specs, mesh)
    flat_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    auto_axes = tuple(a for a in mesh.axis_names if a not in axes and mesh.shape[a] > 1)
    chooser = _Chooser(mesh, stage, axes, auto_axes, blocks, min_bytes, precision)
    chosen = (
        chooser.plan(path, leaf, spec)
        for (path, leaf), spec in zip(named, flat_specs, strict=True)
    )
    leaves = tuple(replace(p, on_host=offload == "all" and p.trained) for p in chosen)
    treedef = jax.tree.structure(abstract_params)
    trained = treedef.unflatten(
        [jax.ShapeDtypeStruct(p.shape, p.dtype) if p.trained else None for p in leaves]
    )
    abstract_state = jax.eval_shape(tx.init, trained)
    trained_leaves = treedef.unflatten([p if p.trained else None for p in leaves])
    opt_specs = opt_state_specs(tx, abstract_state, trained_leaves)
    plan = ZeroPlan(
        mesh,
        stage,
        axes,
        auto_axes,
        leaves,
        treedef,
        opt_specs,
        abstract_state,
        precision,
        None if offload == "none" else split_piecewise(tx, trained),
        offload,
    )
    if tolerance is not None:
        _check_tolerance(plan, tolerance)
    return plan


def check_offload(offload: str, stage: int) -> None:
    """Refuses an unknown `offload`, or one that a stage does not have.

    Raises:
      ValueError: saying what can be given.
    """
    if offload not in OFFLOADS:
        raise ValueError(f"`offload` must be one of {OFFLOADS}, got {offload!r}")
    if offload == "all" and stage != 3:
        raise ValueError(
            "`offload` 'all' needs ZeRO stage 3, at which layers ask for their parameters"
            f" one after the other, got stage {stage}. Give stage 3, or offload 'opt_state'"
        )


@dataclass(frozen=True)
class _Chooser:
    """Chooses the dim along which a leaf is split."""

    mesh: Mesh
    stage: int
    axes: tuple[str, ...]
    auto_axes: tuple[str, ...]
    blocks: Sequence[str]
    min_bytes: int
    precision: Precision

    def plan(self, path: str, leaf, spec: PartitionSpec) -> LeafPlan:
        shape, dtype = tuple(leaf.shape), leaf.dtype
        in_block = any(re.search(pattern, path) for pattern in self.blocks)
        entries: list[Any] = list(spec) + [None] * (len(shape) - len(spec))
        asked = [
            d for d, e in enumerate(entries) if set(entry_axes(e)) & set(self.axes)
        ]
        self._check_asked(path, spec, entries, asked)
        auto = tuple(
            (d - len(shape), e)
            for d, e in enumerate(entries)
            if e is not None and d not in asked
        )
        stacked = in_block and bool(shape) and entries[0] is None and 0 not in asked
        dim, reason = self._choose(shape, dtype, entries, asked, in_block)
        trained = jnp.issubdtype(dtype, jnp.floating)
        tensor = make_spec(None if d in asked else e for d, e in enumerate(entries))
        if dim is None:
            return LeafPlan(
                path,
                shape,
                dtype,
                tensor,
                tensor,
                None,
                False,
                stacked,
                trained,
                reason,
            )
        entries[dim] = self.axes[0] if len(self.axes) == 1 else self.axes
        split = make_spec(entries)
        part = PartSpec(
            dim - len(shape),
            self.axes,
            auto,
            self.auto_axes,
            self.precision.compute,
            self.precision.reduce,
        )
        return LeafPlan(
            path,
            shape,
            dtype,
            split if self.stage == 3 else tensor,
            split if self.stage else tensor,
            part,
            in_block and self.stage == 3,
            stacked,
            trained,
            reason,
        )

    def _check_asked(self, path, spec, entries, asked) -> None:
        if asked and (
            len(asked) > 1 or tuple(entry_axes(entries[asked[0]])) != self.axes
        ):
            raise ValueError(
                f"{path}: a rule's spec must name all of the data parallel axes"
                f" {self.axes} in one dim and in this order, or none of them, got {spec}"
            )

    def _choose(self, shape, dtype, entries, asked, in_block) -> tuple[int | None, str]:
        """The dim to split and why, or None and why not."""
        parts = int(np.prod([self.mesh.shape[a] for a in self.axes]))
        over = "x".join(self.axes)
        if not jnp.issubdtype(dtype, jnp.floating):
            return None, f"whole: {dtype} is no float, not trained"
        if parts == 1:
            return None, f"whole: one device along {over}"
        if asked:
            return asked[0], f"dim {asked[0]} by a rule"
        size = int(np.prod(shape)) * itemsize(dtype)
        if size < self.min_bytes or size == 0:
            return None, f"whole: {size} bytes, less than min_bytes {self.min_bytes}"
        first = 1 if in_block else 0
        free = [d for d in range(first, len(shape)) if entries[d] is None]
        fit = [d for d in free if shape[d] % parts == 0]
        if not fit:
            sizes = [shape[d] for d in free]
            return (
                None,
                f"whole: {parts} ({over}) divides none of its free dims {sizes}",
            )
        dim = max(fit, key=lambda d: shape[d])
        return dim, f"dim {dim} of {shape[dim]}, the largest that {parts} divides"


def itemsize(dtype) -> int:
    """Bytes of a number, or of a PRNG key."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return jnp.dtype(dtype).itemsize


def _check_tolerance(plan: ZeroPlan, tolerance: float) -> None:
    whole = [p for p in plan.leaves if p.trained and p.part is None]
    total = sum(p.nbytes for p in plan.leaves if p.trained)
    left = sum(p.nbytes for p in whole)
    if plan.stage and plan.parts > 1 and left > tolerance * total:
        largest = sorted(whole, key=lambda p: -p.nbytes)[:5]
        lines = "".join(f"\n  - {p.path} {p.shape}: {p.reason}" for p in largest)
        raise ValueError(
            f"at most {tolerance:.1%} of the parameters' bytes may stay whole, but"
            f" {left / max(total, 1):.1%} do:{lines}\nPad a dim to a multiple of"
            f" {plan.parts}, lower `min_bytes`, or raise `tolerance`"
        )

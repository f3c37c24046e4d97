"""Which parameters of a model are tables, and whether each can be one."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from shardjax.embed.optimizers import split_state
from shardjax.embed.table_plan import TablePlan
from shardjax.embed.table_state import TableLeaf, by_path
from shardjax.embed.vocabulary import DeviceVocabulary


def plan_tables(
    params: PyTree,
    paths: Sequence[str],
    optimizer: optax.GradientTransformation
    | Mapping[str, optax.GradientTransformation],
    *,
    mesh: Mesh | None = None,
    axes: Sequence[str] | None = None,
    vocabularies: Mapping[str, DeviceVocabulary] | None = None,
) -> TablePlan:
    """Plans the tables of a model: those that it looks up with ids of its own.

    Args:
      params: the parameters or their shapes.
      paths: of the tables among them: `table_paths(model)`, or written like "user/embedding".
        Each is an array [rows, dim]; leading dims are those of stacked layers.
      optimizer: of the rows, one for all tables or one per path: any optax transformation
        that works row by row. Rows that a step does not look up do not move.
      mesh: devices whose memory the rows are split over. The step then runs inside
        `jax.shard_map`, each device on its part of the batch; None for one device and a
        plain `jax.jit`.
      axes: mesh axes to split over, None for all.
      vocabularies: by path, of tables whose rows are given to 64-bit keys as they come
        (`Keys` in the batch); their number of rows is how many keys there is room for.

    Raises:
      TypeError: for `paths` that are a string, or a table that is no array of floats.
      ValueError: for a path that is not there, or there twice, a table that has no rows and
        dim or more than 2**30 rows, an optimizer that is missing or belongs to no table, or
        an axis that the mesh lacks.
      RowOptimizerError: for an optimizer that does not work row by row.

    Example:
      >>> import jax
      >>> from shardjax.embed.in_graph import lookup
      >>> params = {"item": jnp.ones((5, 2)), "w": jnp.ones(2)}
      >>> plan = plan_tables(params, ["item"], optax.sgd(0.5))
      >>> dense, tables = plan.split(params), plan.init(params)
      >>> def loss(params, ids):
      ...   return jnp.sum(lookup(params["item"], ids) @ params["w"])
      >>> def step(dense, tables, ids):
      ...   value, grads, rows, tables = plan.value_and_grad(loss)(dense, tables, ids)
      ...   return value, grads, plan.update(tables, rows)
      >>> step = jax.jit(step, donate_argnums=1)
      >>> value, grads, tables = step(dense, tables, jnp.array([3, 1, 3]))
      >>> plan.join(dense, tables)["item"][:, 0]
      Array([1. , 0.5, 1. , 0. , 1. ], dtype=float32)
    """
    if isinstance(paths, str):
        raise TypeError(f"`paths` must be a sequence of paths, got {paths!r}")
    leaves = by_path(params)
    if len(set(paths)) != len(paths):
        raise ValueError(f"`paths` must name each table once, got {list(paths)}")
    if isinstance(optimizer, Mapping) and set(optimizer) != set(paths):
        raise ValueError(
            f"`optimizer` must have one for each of the tables {sorted(paths)}, got those"
            f" of {sorted(optimizer)}"
        )
    if mesh is not None:
        axes = tuple(mesh.axis_names if axes is None else axes)
        if missing := [axis for axis in axes if axis not in mesh.axis_names]:
            raise ValueError(
                f"`axes` must be axes of the mesh, {mesh.axis_names}, got {missing}"
            )
    elif axes:
        raise ValueError(f"`axes` are those of a mesh, got {axes} without one")

    def plan(path: str) -> TableLeaf:
        if path not in leaves:
            raise ValueError(
                f"no parameter has the path {path!r} of a table; there are {list(leaves)}"
            )
        x = leaves[path]
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"the table {path!r} must hold floats, got {x.dtype}")
        rows = int(np.prod(x.shape[:-1]))
        if len(x.shape) < 2 or 0 in x.shape or rows > 2**30:
            raise ValueError(
                f"the table {path!r} must have the shape [rows, dim], or [layers, rows,"
                f" dim], of 1 to 2**30 rows, got {list(x.shape)}"
            )
        tx: Any = optimizer[path] if isinstance(optimizer, Mapping) else optimizer
        dtype = jnp.dtype(x.dtype)
        row_optimizer = split_state(tx, x.shape[-1], dtype, path)
        return TableLeaf(path, tuple(x.shape), dtype, row_optimizer, known.get(path))

    known = dict(vocabularies or {})
    if more := sorted(set(known) - set(paths)):
        raise ValueError(
            f"`vocabularies` must be of tables among {sorted(paths)}, got those of {more}"
        )
    planned = TablePlan(tuple(map(plan, paths)), mesh, tuple(axes or ()))
    planned.abstract()  # refuses rows that do not divide
    return planned

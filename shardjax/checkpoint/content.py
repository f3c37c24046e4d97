"""What of a training state goes where in a checkpoint, and back.

Arrays go by their path in the state. Rows of embedding tables go by their keys, so that
they can lie otherwise afterwards; of their slabs only what the rows of one share is an
array. Metrics in progress have a part per device: on another number of devices they are
merged into one.

Tables that a model looks up itself (`TableState`) go as arrays, by the names of the leaves
of their optimizer. What fills them up to a multiple of the devices does not count, and what
only a step needs (`places` and `merged`) is not written. Where their rows have keys, other
devices or another number of rows mean other places: such a table is read as it was saved,
to the host, and its keys are inserted anew.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from shardjax.checkpoint.leaves import flatten, flatten_target, is_ignored
from shardjax.embed import EmbeddingCollection, TableState
from shardjax.embed.moves import SlabState
from shardjax.embed.probing import BUCKET, buckets_for
from shardjax.embed.table_placing import rehash_table
from shardjax.metrics import merge_stacked
from shardjax.partition import leaf_path
from shardjax.sharded import fetch, place


def fields_of(state: Any) -> dict[str, Any]:
    """The parts of a state by name."""
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {"state": state}


def arrays_of(
    fields: Mapping[str, Any], collection: EmbeddingCollection | None
) -> dict[str, Any]:
    """The parts of a state, of `fields_of`, as what is written of them: arrays."""
    parts = jax.tree.map(_saved, dict(fields), is_leaf=_is_table)
    if collection is not None:
        parts["tables"] = {
            group.name: list(slab.shared)
            for group, slab in zip(collection.groups, fields["tables"], strict=True)
        }
    return parts


def _is_table(x: Any) -> bool:
    return isinstance(x, TableState)


def _saved(x: Any) -> Any:
    """What is written of a table; anything else as it is."""
    if not _is_table(x):
        return x
    row_names, shared_names = x.names
    return {
        "rows": x.rows,
        "row_state": dict(zip(row_names, x.row_state, strict=True)),
        "shared": dict(zip(shared_names, x.shared, strict=True)),
        "keys": x.keys,
    }


def lengths_of(fields: Mapping[str, Any]) -> dict[str, int]:
    """By path of an array of `arrays_of`, how many rows count of those that are padded."""
    found = jax.tree_util.tree_leaves_with_path(fields, is_leaf=_is_table)
    lengths = {}
    for keys, x in found:
        if _is_table(x):
            saved = _saved(x)
            of_rows = {name: saved[name] for name in ("rows", "row_state")}
            path = leaf_path(keys)
            lengths |= {f"{path}/{name}": x.count for name in flatten_target(of_rows)}
    return lengths


def without_padding(
    described: Mapping[str, Mapping[str, Any]], lengths: Mapping[str, int]
) -> dict[str, Any]:
    """Descriptions of arrays, with the shapes of what counts of them."""
    return {
        path: leaf
        if path not in lengths
        else {**leaf, "shape": [lengths[path], *leaf["shape"][1:]]}
        for path, leaf in described.items()
    }


def with_tables_as_saved(
    fields: Mapping[str, Any],
    arrays: Mapping[str, Mapping[str, Any]],
    ignore: Sequence[str],
) -> dict[str, Any]:
    """The parts of a target with tables of keys as a checkpoint has them.

    Args:
      fields: of `fields_of`.
      arrays: descriptions of the arrays in the checkpoint, by path.
      ignore: patterns of paths that are not read.

    Returns:
      The parts. Where the keys of a table lie otherwise there, its rows and keys are NumPy
      arrays of the shapes that they have in the checkpoint.
    """

    def one(keys, table):
        path = leaf_path(keys)
        rows, counts = (arrays.get(f"{path}/{x}") for x in ("rows", "keys/count"))
        if not _is_table(table) or table.keys is None or not rows or not counts:
            return table
        if table.rows.sharding is None or is_ignored(f"{path}/keys/count", ignore):
            return table
        count, devices = rows["shape"][0], counts["shape"][0]
        if (count, devices) == (table.count, table.keys.count.size):
            return table
        capacity = count // devices
        buckets = devices * buckets_for(capacity)

        def stand_in(x, size, name):
            if is_ignored(f"{path}/{name}", ignore):
                return x
            return np.broadcast_to(np.zeros((), x.dtype), (size, *x.shape[1:]))

        sizes = {"passed": buckets, "count": devices}
        saved_keys = {
            name: stand_in(
                getattr(table.keys, name),
                sizes.get(name, buckets * BUCKET),
                f"keys/{name}",
            )
            for name in ("hi", "lo", "tags", "passed", "count")
        }
        return dataclasses.replace(
            table,
            rows=stand_in(table.rows, count, "rows"),
            row_state=[
                stand_in(x, count, f"row_state/{name}")
                for name, x in zip(table.names[0], table.row_state, strict=True)
            ],
            shape=(count, *table.shape[1:]),
            keys=dataclasses.replace(table.keys, capacity=capacity, **saved_keys),
        )

    return jax.tree_util.tree_map_with_path(one, dict(fields), is_leaf=_is_table)


def with_model_tables(
    parts: Mapping[str, Any],
    fields: Mapping[str, Any],
    saved: Mapping[str, Any],
    collection: EmbeddingCollection | None,
) -> dict[str, Any]:
    """What was read, with a `TableState` for each table.

    Args:
      parts: like `arrays_of(saved, collection)`.
      fields: of the target.
      saved: of `with_tables_as_saved`.
      collection: of the target.

    Raises:
      ValueError: if keys find no room in a table.
    """
    names = [x for x in fields if collection is None or x != "tables"]
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        {name: fields[name] for name in names}, is_leaf=_is_table
    )
    was, found = (
        structure.flatten_up_to({name: tree[name] for name in names})
        for tree in (saved, parts)
    )

    def whole(path, like, x, found):
        if not _is_table(x):
            return found
        places, merged = map(_zeros_like, (x.places, x.merged))
        row_state, shared = (
            [found[field][name] for name in names]
            for field, names in zip(("row_state", "shared"), x.names, strict=True)
        )
        kept = found["rows"], row_state, shared, places, merged
        table = TableState(*kept, x.shape, x.names, found["keys"])
        return table if x is like else rehash_table(leaf_path(path), table, like)

    whole_parts = structure.unflatten(
        whole(*leaf, *x) for leaf, *x in zip(leaves, was, found, strict=True)
    )
    return {**parts, **whole_parts}


def _zeros_like(x: Any) -> jax.Array:
    make = partial(jax.numpy.zeros, x.shape, x.dtype)
    return jax.jit(make, out_shardings=x.sharding)()


def target_of(
    fields: Mapping[str, Any],
    collection: EmbeddingCollection | None,
    tables: Mapping[str, Any] | None,
    arrays: Mapping[str, Any],
    step: int,
) -> dict[str, Any]:
    """Like `arrays_of`, with what lies otherwise in the checkpoint as it is there.

    Args:
      fields: of the state that is wanted, of `fields_of`.
      collection: of its tables.
      tables: the description of those in the checkpoint.
      arrays: descriptions of the arrays in the checkpoint, by path.
      step: of the checkpoint.

    Raises:
      ValueError: if one has tables and the other none.
    """
    parts = arrays_of(fields, collection)
    if (collection is None) != (tables is None):
        has, lacks = ("checkpoint", "state that it is restored to")
        if tables is None:
            has, lacks = "state", f"checkpoint of step {step}"
        raise ValueError(
            f"the {has} has embedding tables and the {lacks} has none: give the"
            " Checkpointer the `collection` that the checkpoint was made with, or none"
        )
    if collection is None or tables is None:
        return parts
    everywhere = jax.NamedSharding(collection.mesh, jax.P())

    def as_saved(path):
        saved = arrays[path]
        return jax.ShapeDtypeStruct(
            tuple(saved["shape"]), jax.numpy.dtype(saved["dtype"]), sharding=everywhere
        )

    parts["tables"] = {
        group["name"]: [
            as_saved(path)
            for path in sorted(
                (p for p in arrays if p.startswith(f"tables/{group['name']}/")),
                key=lambda p: int(p.rsplit("/", 1)[1]),
            )
        ]
        for group in tables["groups"]
    }
    if "metrics" in parts and tables["devices"] != collection.devices:
        metrics = flatten({"metrics": parts["metrics"]})
        if all(path in arrays for path in metrics):
            leaves, tree = jax.tree.flatten(parts["metrics"])
            assert len(leaves) == len(metrics)
            parts["metrics"] = tree.unflatten([as_saved(path) for path in metrics])
    return parts


def shared_of(
    slabs: Sequence[SlabState],
    collection: EmbeddingCollection,
    tables: Mapping[str, Any],
    found: Mapping[str, Sequence[jax.Array]],
) -> tuple[SlabState, ...]:
    """Slabs with what their rows share, which may have been in other groups.

    Raises:
      ValueError: if a group's tables have shared other values in the checkpoint.
    """
    group_of = {name: g["name"] for g in tables["groups"] for name in g["tables"]}
    out = []
    for group, slab in zip(collection.groups, slabs, strict=True):
        names = [t.spec.name for t in group.tables]
        sources = {group_of[name] for name in names if name in group_of}
        values = [found[name] for name in sorted(sources)]
        if not values or len(values[0]) != len(slab.shared):
            out.append(slab)  # new tables, or a new optimizer
            continue
        for other in values[1:]:
            for a, b in zip(values[0], other, strict=True):
                if not np.array_equal(np.asarray(a), np.asarray(b)):
                    raise ValueError(
                        f"tables {names} share an optimizer's counts here, and had"
                        f" different ones in the checkpoint, such as {np.asarray(a)} and"
                        f" {np.asarray(b)}: give the tables that were trained apart"
                        " optimizers of their own, one object each"
                    )
        shared = [
            jax.device_put(x.astype(old.dtype), old.sharding, may_alias=False)
            for x, old in zip(values[0], slab.shared, strict=True)
        ]
        out.append(SlabState(slab.rows, slab.row_state, shared))
    return tuple(out)


def metrics_of(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with a part per device, from those of another number of devices.

    Args:
      found: parts [devices then, ...] of each leaf.
      wanted: empty ones, [devices now, ...].
    """
    out = {}
    for name, metric in wanted.items():
        merged = merge_stacked(found[name])

        def first(part, empty):
            stacked = np.array(fetch(empty))
            stacked[0] = np.asarray(part)
            return place(stacked, empty.sharding)

        out[name] = jax.tree.map(first, merged, metric)
    return out

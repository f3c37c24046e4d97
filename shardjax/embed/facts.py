"""What of a collection must be the same in all processes."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.embed.groups import Group
from shardjax.embed.spec import FeatureSpec, TableSpec


def collection_facts(
    features: Mapping[str, FeatureSpec],
    groups: Sequence[Group],
    mesh: jax.sharding.Mesh,
    seed: int,
) -> dict[str, Any]:
    """Facts for `shardjax.processes.check_agreement`.

    Optimizers and initializers are among them as hashes of their programs, numbers such
    as a learning rate included.

    Args:
      features, groups, mesh, seed: of the collection.
    """
    tables = {}
    for group in groups:
        leaves = [[list(x.shape), str(x.dtype)] for x in group.optimizer.row_leaves]
        optimizer = _optimizer_hash(group)
        storage = group.storage
        for table in group.tables:
            spec = table.spec
            tables[spec.name] = {
                "group": group.name,
                "dim": spec.dim,
                "dtype": np.dtype(spec.dtype).name,
                "row_state": leaves,
                "optimizer": optimizer,
                "initializer": _initializer_hash(spec),
                "capacity": spec.capacity,
                "vocabulary": spec.vocabulary,
                "placement": spec.placement,
                "on_full": spec.on_full,
                "admit": repr(spec.admit),
                "evict": repr(spec.evictions),
                "device_rows": None if storage is None else storage.device_rows,
            }
    return {
        "mesh": dict(mesh.shape),
        "seed": seed,
        "order": list(features),
        "tables": tables,
        "features": {name: _feature_facts(x) for name, x in features.items()},
    }


def _feature_facts(feature: FeatureSpec) -> dict[str, Any]:
    own = {f.name: getattr(feature, f.name) for f in fields(feature)}
    return own | {"table": feature.table.name}


def _optimizer_hash(group: Group) -> str:
    """Of the first state of a group's rows and of their update."""

    def step(grads, rows):
        return group.optimizer.update(grads, *group.optimizer.init(rows), rows)

    rows = jax.ShapeDtypeStruct((2, group.dim), group.dtype)
    return program_hash(step, rows, rows)


def _initializer_hash(spec: TableSpec) -> str:
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    return program_hash(lambda k: spec.initializer(k, (spec.dim,), spec.dtype), key)


def program_hash(function: Callable, *args: Any) -> str:
    """A hash of what a function computes: the same in all processes, whatever machines
    they run on, if it has the same operations and numbers.

    What a function calls back on the host, or reads while it is not traced, is not seen.

    Args:
      function: that JAX can trace.
      args: arrays or `jax.ShapeDtypeStruct`s.

    Example:
      >>> rate = 0.1
      >>> first = program_hash(lambda x: rate * x, jnp.zeros(3))
      >>> rate = 0.2
      >>> first == program_hash(lambda x: rate * x, jnp.zeros(3))
      False
    """
    program = jax.make_jaxpr(function)(*args)
    text = re.sub(r"\b0x[0-9a-f]+", "", str(program.jaxpr))  # addresses of functions
    found = hashlib.sha256(text.encode())
    for value in program.consts:
        found.update(np.asarray(jnp.asarray(value)).tobytes())
    return found.hexdigest()[:12]

"""Which tables share a slab: features -> tables -> groups, fixed when a collection is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from shardjax.embed.optimizers import RowOptimizer, split_state
from shardjax.embed.spec import FeatureSpec, TableSpec
from shardjax.embed.storage import Storage


@dataclass(frozen=True)
class Table:
    """A table within its group.

    Attributes:
      spec: what the user said.
      features: names of the features that read it, in the order given.
      owner: the one device of a `table_wise` table, else -1.
      salt: uint64 added to its keys, so that equal keys of two tables hash apart.
    """

    spec: TableSpec
    features: tuple[str, ...]
    owner: int
    salt: np.uint64


@dataclass(frozen=True)
class Group:
    """Tables in one slab.

    Attributes:
      name: "group0", "group1", ...
      tables: in the order of their first feature.
      dim: numbers per row.
      dtype: of the rows.
      optimizer: of the rows.
      replicated: placement `data_parallel`: every device has all rows.
      storage: where the rows lie; None for all on the devices.
    """

    name: str
    tables: tuple[Table, ...]
    dim: int
    dtype: Any
    optimizer: RowOptimizer
    replicated: bool
    storage: Storage | None = None


def table_salt(name: str) -> np.uint64:
    """What is added to the keys of a table of this name, modulo 2**64."""
    digest = blake2b(name.encode(), digest_size=8, person=b"shardjax table")
    return np.frombuffer(digest.digest(), "<u8")[0]


def plan_groups(
    features: Mapping[str, FeatureSpec], devices: int, storage: Storage | None = None
) -> tuple[Group, ...]:
    """Groups the tables of these features by what lets them share a slab.

    `table_wise` tables go to the device that has the fewest rows so far, the largest
    table first. A table that does not say where its rows lie has the `storage`.

    Raises:
      TypeError: for a feature that is not a FeatureSpec.
      ValueError: for no feature, or two different tables of one name.
    """
    if not features:
        raise ValueError("a collection needs at least one feature, got none")
    tables: dict[str, TableSpec] = {}
    readers: dict[str, list[str]] = {}
    for name, feature in features.items():
        if not isinstance(feature, FeatureSpec):
            raise TypeError(f"feature {name!r} must be a FeatureSpec, got {feature!r}")
        table = feature.table
        if tables.setdefault(table.name, table) != table:
            raise ValueError(
                f"two different tables are named {table.name!r}. Give each its own name, or"
                " pass the same TableSpec to the features that share it"
            )
        readers.setdefault(table.name, []).append(name)

    def size(name):
        return tables[name].capacity or tables[name].vocabulary or 0

    alone = [n for n, t in tables.items() if t.placement == "table_wise"]
    load = [0] * devices
    owners = dict.fromkeys(tables, -1)
    for name in sorted(alone, key=lambda n: (-size(n), n)):
        owner = min(range(devices), key=lambda d: (load[d], d))
        owners[name] = owner
        load[owner] += max(size(name), 1)

    shared: dict[tuple, list[Table]] = {}
    for name, spec in tables.items():
        replicated = spec.placement == "data_parallel"
        own = storage if spec.storage is None else spec.storage
        if replicated or own == "device":
            own = None
        key = (spec.dim, spec.dtype, id(spec.optimizer), replicated, own)
        table = Table(spec, tuple(readers[name]), owners[name], table_salt(name))
        shared.setdefault(key, []).append(table)
    optimizers: dict[tuple, RowOptimizer] = {}
    groups = []
    for i, ((dim, dtype, tx, replicated, own), members) in enumerate(shared.items()):
        if (dim, dtype, tx) not in optimizers:
            spec = members[0].spec
            optimizers[dim, dtype, tx] = split_state(
                spec.optimizer, dim, dtype, spec.name
            )
        optimizer = optimizers[dim, dtype, tx]
        groups.append(
            Group(f"group{i}", tuple(members), dim, dtype, optimizer, replicated, own)
        )
    return tuple(groups)

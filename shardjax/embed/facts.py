"""What of a collection must be the same in all processes."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import numpy as np

from shardjax.embed.groups import Group
from shardjax.embed.spec import FeatureSpec


def collection_facts(
    features: Mapping[str, FeatureSpec],
    groups: Sequence[Group],
    mesh: jax.sharding.Mesh,
    seed: int,
) -> dict[str, Any]:
    """Facts for `shardjax.processes.check_agreement`.

    Functions (initializers, an optimizer's update) are not among them: they cannot be
    compared.

    Args:
      features, groups, mesh, seed: of the collection.
    """
    tables = {}
    for group in groups:
        leaves = [[list(x.shape), str(x.dtype)] for x in group.optimizer.row_leaves]
        storage = group.storage
        for table in group.tables:
            spec = table.spec
            tables[spec.name] = {
                "group": group.name,
                "dim": spec.dim,
                "dtype": np.dtype(spec.dtype).name,
                "row_state": leaves,
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

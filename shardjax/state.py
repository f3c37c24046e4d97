"""The state of a training run: one pytree, of which every leaf has a sharding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardjax.embed import EmbeddingCollection, EmbeddingState
from shardjax.metrics import Metric, merge_stacked
from shardjax.network import Network


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a training step changes. Donated to the step: keep no old one."""

    step: jax.Array  # int32 [], steps taken; on all devices
    params: Any  # the network's, on all devices
    model_state: Any  # batch statistics, dropout keys; on all devices
    opt_state: Any  # optax state of params, on all devices
    tables: EmbeddingState  # slabs; see shardjax.embed.SlabState
    metrics: dict[str, Metric]  # [devices, ...] each leaf, over all mesh axes

    def replace(self, **changes) -> "TrainState":
        """A copy with other values for some fields."""
        return replace(self, **changes)


def stack_metrics(
    metrics: Mapping[str, Metric], mesh: jax.sharding.Mesh
) -> dict[str, Metric]:
    """Empty metrics with one part per device, on the devices of the mesh."""
    sharding = jax.NamedSharding(mesh, jax.P(mesh.axis_names))

    def stack(x):
        x = np.asarray(x)
        return np.broadcast_to(x, (mesh.size, *x.shape))

    return {
        name: jax.device_put(jax.tree.map(stack, metric), sharding)
        for name, metric in metrics.items()
    }


def compute_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Merges the devices' parts and computes the values."""
    return {
        name: float(merge_stacked(metric).compute()) for name, metric in metrics.items()
    }


def init_state(
    network: Network,
    tx: optax.GradientTransformation,
    collection: EmbeddingCollection,
    metrics: Mapping[str, Metric] | None = None,
) -> TrainState:
    """The state before the first step, on the collection's mesh.

    Args:
      network: its parameters are copied.
      tx: optimizer of the parameters, any optax transformation.
      collection: the tables.
      metrics: of training, by name.
    """
    mesh = collection.mesh
    everywhere = jax.NamedSharding(mesh, jax.P())

    def copy(tree):
        # a copy of each leaf: the step donates its state, never the user's arrays
        return jax.jit(lambda t: jax.tree.map(jnp.copy, t), out_shardings=everywhere)(
            tree
        )

    params = copy(network.params)
    return TrainState(
        step=jax.device_put(jnp.zeros([], jnp.int32), everywhere),
        params=params,
        model_state=copy(network.state),
        opt_state=jax.jit(tx.init, out_shardings=everywhere)(params),
        tables=collection.init(),
        metrics=stack_metrics(metrics or {}, mesh),
    )

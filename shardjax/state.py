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
from shardjax.precision import LossScale, Precision
from shardjax.rl.target import TargetRule, init_target
from shardjax.sharded import place
from shardjax.zero import ZeroPlan, init_state as init_dense, plan_zero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a training step changes. Donated to the step: keep no old one."""

    step: jax.Array  # int32 [], steps taken; on all devices
    params: Any  # the network's, as the plan says; without one, on all devices
    model_state: Any  # batch statistics, dropout keys; on all devices
    opt_state: Any  # optax state of params, as the plan says
    loss_scale: LossScale | None  # where the loss is scaled; on all devices
    tables: EmbeddingState  # slabs; see shardjax.embed.SlabState
    metrics: dict[str, Metric]  # [devices, ...] each leaf, over all mesh axes
    target: Any = (
        None  # of params, where an objective needs one; as params, f32 at least
    )

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
        name: place(jax.tree.map(stack, metric), sharding)
        for name, metric in metrics.items()
    }


def compute_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Merges the devices' parts and computes the values."""
    return {
        name: float(merge_stacked(metric).compute()) for name, metric in metrics.items()
    }


def plan_network(
    network: Network,
    tx: optax.GradientTransformation,
    collection: EmbeddingCollection,
    stage: int = 0,
    *,
    min_bytes: int = 4096,
    precision: Precision | str = "f32",
    tolerance: float | None = None,
) -> ZeroPlan:
    """Plans where the parameters of a network lie: ZeRO over all devices of the tables.

    Give the plan to `init_state` and to `make_train_step`.

    Args:
      network: whose parameters.
      tx: their optimizer.
      collection: the tables, each device of which trains on its own examples.
      stage, min_bytes, precision, tolerance: as of `shardjax.zero.plan_zero`.

    Example:
      >>> import optax, shardjax as sj
      >>> from flax import nnx
      >>> item = sj.embed.TableSpec("item", dim=4, optimizer=optax.sgd(0.1))
      >>> tables = sj.embed.EmbeddingCollection(
      ...   {"item": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1"))
      >>> network = sj.from_nnx(sj.models.LogisticRegression(
      ...   features=("item",), n_dense=3, dim=4, rngs=nnx.Rngs(0)))
      >>> plan_network(network, optax.adam(1e-3), tables, 2).stage
      2
    """
    return plan_zero(
        network.params,
        tx,
        collection.mesh,
        stage,
        axes=collection.axes,
        min_bytes=min_bytes,
        precision=precision,
        tolerance=tolerance,
    )


def init_state(
    network: Network,
    tx: optax.GradientTransformation,
    collection: EmbeddingCollection,
    metrics: Mapping[str, Metric] | None = None,
    *,
    zero: ZeroPlan | None = None,
    target: TargetRule | None = None,
) -> TrainState:
    """The state before the first step, on the collection's mesh.

    Args:
      network: its parameters are copied.
      tx: optimizer of the parameters, any optax transformation.
      collection: the tables.
      metrics: of training, by name.
      zero: of `plan_network`: how parameters and optimizer state are split; None for all
        on every device.
      target: how the target of the parameters follows them, where there is to be one; see
        `shardjax.rl.QLearning`.
    """
    mesh = collection.mesh
    plan = zero or plan_network(network, tx, collection)
    everywhere = jax.NamedSharding(mesh, jax.P())

    def copy(tree):
        # a copy of each leaf: the step donates its state, never the user's arrays
        return jax.jit(lambda t: jax.tree.map(jnp.copy, t), out_shardings=everywhere)(
            tree
        )

    dense = init_dense(network.params, tx, plan)
    return TrainState(
        step=dense.step,
        params=dense.params,
        model_state=copy(network.state),
        opt_state=dense.opt_state,
        loss_scale=dense.loss_scale,
        tables=collection.init(),
        metrics=stack_metrics(metrics or {}, mesh),
        target=None if target is None else init_target(dense.params, target),
    )

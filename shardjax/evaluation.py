"""Evaluation: steps that read the state and change nothing."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax

from shardjax.embed import EmbeddingCollection, sequence_masks, split_features
from shardjax.metrics import Metric
from shardjax.network import Network, finish_logits
from shardjax.objectives import (
    Loss,
    binary_cross_entropy,
    example_losses,
    update_metrics,
)
from shardjax.pacing import Pace
from shardjax.preparing import PreparedBatch, check_prepared
from shardjax.state import TrainState, stack_metrics


def _outputs(network, collection, params, model_state, tables, arrays, layout):
    """What a model returns without training, of this device's examples."""
    rows = collection.gather_rows(tables, arrays)
    blocks = collection.embed(rows, arrays, layout)
    embeddings = split_features(layout, blocks, sequence_masks(layout, arrays))
    outputs, _ = network.apply(
        params, model_state, arrays["dense"], embeddings, train=False
    )
    return outputs


def make_apply_step(
    network: Network, collection: EmbeddingCollection
) -> Callable[[TrainState, PreparedBatch], Any]:
    """Makes what gives the outputs of a model; it reads the state and inserts nothing.

    Args:
      network, collection: as of `make_train_step`.

    Returns:
      `step(state, batch) -> outputs`, for a batch prepared with `train=False`: what the
      model returns, each leaf [devices * examples, ...], of which the first `batch.size`
      are those of the batch.
    """
    by_device = jax.P(collection.axes)

    def local_step(params, model_state, tables, packed, *, layout):
        arrays = layout.unpack(packed[0])
        outputs = _outputs(
            network, collection, params, model_state, tables, arrays, layout
        )
        return outputs, jax.numpy.int32(0)  # to wait for: outputs may be donated

    @partial(jax.jit, static_argnames="layout")
    def run(params, model_state, tables, packed, *, layout):
        return jax.shard_map(
            partial(local_step, layout=layout),
            mesh=collection.mesh,
            in_specs=(jax.P(), jax.P(), collection.state_spec(), by_device),
            out_specs=(by_device, jax.P()),
            check_vma=False,
        )(params, model_state, tables, packed)

    pace = Pace()

    def step(state: TrainState, batch: PreparedBatch):
        check_prepared(batch)
        pace.wait()
        collection.planner.check_current(batch.plan)
        outputs, done = run(
            state.params,
            state.model_state,
            state.tables,
            batch.packed,
            layout=batch.layout,
        )
        pace.add(done)
        return outputs

    step.jitted = run
    return step


def make_eval_step(
    network: Network,
    collection: EmbeddingCollection,
    *,
    loss: Loss = binary_cross_entropy,
    predict: Callable[[jax.Array], jax.Array] = jax.nn.sigmoid,
) -> Callable[..., tuple[dict[str, Metric], jax.Array]]:
    """Makes the evaluation step: reads the state, inserts nothing.

    Args:
      network, collection, loss, predict: as of `make_train_step`.

    Returns:
      `step(state, metrics, batch) -> (metrics, predictions)`: metrics of
      `stack_metrics`, donated; predictions float32 [devices * examples], of which the
      first `batch.size` are those of the batch.
    """
    mesh, axes = collection.mesh, collection.axes

    def local_step(params, model_state, tables, metrics, packed, *, layout):
        arrays = layout.unpack(packed[0])
        outputs = _outputs(
            network, collection, params, model_state, tables, arrays, layout
        )
        logits = finish_logits(outputs, layout.examples)
        losses = example_losses(loss, logits, arrays["labels"], arrays["weights"])
        metrics = update_metrics(metrics, arrays, logits, losses, predict)
        return metrics, predict(logits)

    spec = collection.state_spec()
    by_device = jax.P(axes)

    @partial(jax.jit, static_argnames="layout", donate_argnames="metrics")
    def run(params, model_state, tables, metrics, packed, *, layout):
        return jax.shard_map(
            partial(local_step, layout=layout),
            mesh=mesh,
            in_specs=(jax.P(), jax.P(), spec, by_device, by_device),
            out_specs=(by_device, by_device),
            check_vma=False,
        )(params, model_state, tables, metrics, packed)

    pace = Pace()

    def step(state: TrainState, metrics, batch: PreparedBatch):
        pace.wait()
        check_prepared(batch)
        collection.planner.check_current(batch.plan)
        metrics, predictions = run(
            state.params,
            state.model_state,
            state.tables,
            metrics,
            batch.packed,
            layout=batch.layout,
        )
        pace.add(predictions)
        return metrics, predictions

    step.jitted = run
    return step


def evaluate(
    step,
    state: TrainState,
    batches: Iterable[PreparedBatch],
    metrics: Mapping[str, Metric],
    mesh: jax.sharding.Mesh,
) -> tuple[dict[str, Metric], dict[str, float]]:
    """Runs an evaluation step over batches.

    Args:
      step: of `make_eval_step`.
      state: read only.
      batches: prepared with `train=False`.
      metrics: empty ones, by name.
      mesh: of the collection.

    Returns:
      The metrics (read them with `compute_metrics`) and the summed counters.
    """
    stacked = stack_metrics(metrics, mesh)
    counters: dict[str, float] = {}
    for batch in batches:
        stacked, _ = step(state, stacked, batch)
        add_counters(counters, batch.counters)
    return stacked, counters


def add_counters(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds a batch's counters to `total`; of an imbalance, the largest is kept."""
    for name, value in more.items():
        if name == "exchange_imbalance":
            total[name] = max(total.get(name, 1.0), value)
        else:
            total[name] = total.get(name, 0) + value

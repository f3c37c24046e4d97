"""Training without sharding, by `shardjax.embed.lookup`, and batches for it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardjax.data.batch import Batch
from shardjax.embed import (
    EmbeddingCollection,
    Jagged,
    Sequence,
    sequence_masks,
    split_features,
)
from shardjax.embed.layout import pack
from shardjax.embed.lookup import lookup, lookup_sequence, update
from shardjax.mesh import make_mesh


def wide_keys(n: int, seed: int = 0) -> np.ndarray:
    """n different keys, uint64 [n], over the whole range, 0 and 2**64 - 1 included."""
    rng = np.random.default_rng(seed)
    keys = {0, 2**64 - 1}
    while len(keys) < n:
        keys.add(int(rng.integers(2**64, dtype=np.uint64)))
    return np.array(sorted(keys), np.uint64)


def unmix64(x: int) -> int:
    """The inverse of mix64."""

    def unshift(x, n):
        y = x
        for _ in range(64 // n + 1):
            y = x ^ (y >> n)
        return y

    x = unshift(x, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return unshift(x, 30)


LENGTHS = (2, 0, 5, 1, 3, 0, 2, 4, 1, 2, 6, 0, 1, 3)


def random_bags(
    rng: np.random.Generator, batch: int, keys: np.ndarray, *, weighted: bool = False
) -> Jagged:
    """Bags with many duplicates, empty ones, and (weighted) zero sums of weights.

    Equal batch sizes give equal numbers of keys, so that JAX compiles few shapes.
    """
    lengths = rng.permutation(np.resize(LENGTHS, batch))
    total = int(lengths.sum())
    chance = 1 / (1 + np.arange(len(keys)))
    values = rng.choice(keys, total, p=chance / chance.sum())
    if not weighted:
        return Jagged(values, lengths)
    weights = rng.uniform(0.25, 1.5, total).astype(np.float32)
    ends = np.cumsum(lengths)
    for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if length and i % 5 == 0:
            weights[end - length : end] = 0
        elif length == 2:
            weights[end - 2 : end] = 0.75, -0.75
    return Jagged(values, lengths, weights)


def bag_rows(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The place of each value among sorted keys, -1 where it is not there."""
    at = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
    return np.where(keys[at] == values, at, -1)


def dense_features(features, keys, tables, batch: Batch) -> dict:
    """The embeddings of a batch, by the functions of `shardjax.embed.lookup`.

    Args:
      features: FeatureSpec by name.
      keys: by table name, uint64 [vocabulary], sorted.
      tables: by table name, [vocabulary, dim].
      batch: its values.
    """
    values = dict(zip(batch.fixed_names, batch.fixed, strict=True)) | batch.jagged
    out = {}
    for name, spec in features.items():
        bags = values[name]
        if not isinstance(bags, Jagged):
            bags = Jagged(bags, np.ones(batch.size, np.int32))
        table = tables[spec.table.name]
        rows = bag_rows(keys[spec.table.name], bags.values)
        if spec.combiner == "none":
            length = spec.max_length or max(int(bags.lengths.max(initial=1)), 1)
            out[name] = Sequence(*lookup_sequence(table, rows, bags.lengths, length))
        else:
            out[name] = lookup(table, rows, bags.lengths, bags.weights, spec.combiner)
    return out


class DenseTraining:
    """The whole of a training run on plain arrays, a dense optax step per table."""

    def __init__(self, features, network, tx, keys, rows):
        """Starts a run.

        Args:
          features: FeatureSpec by name.
          network: `shardjax.network.Network`.
          tx: optimizer of the parameters.
          keys: by table name, uint64 [vocabulary], sorted.
          rows: by table name, [vocabulary, dim], the first values.
        """
        self.features, self.network, self.tx, self.keys = features, network, tx, keys
        self.specs = {f.table.name: f.table for f in features.values()}
        self.params = network.params
        self.opt_state = tx.init(self.params)
        self.tables = {name: jnp.asarray(r) for name, r in rows.items()}
        self._programs = {}  # lengths are part of a program: one per batch
        self.states = {
            n: s.optimizer.init(self.tables[n]) for n, s in self.specs.items()
        }

    def step(self, batch: Batch) -> float:
        """One step; returns the loss."""
        if id(batch) not in self._programs:
            self._programs[id(batch)] = jax.jit(partial(self._step, batch))
        value, *state = self._programs[id(batch)](
            self.params, self.opt_state, self.tables, self.states
        )
        self.params, self.opt_state, self.tables, self.states = state
        return float(value)

    def embeddings(self, tables, batch: Batch) -> dict:
        """What a model gets of a batch."""
        return dense_features(self.features, self.keys, tables, batch)

    def logits(self, batch: Batch) -> jax.Array:
        """Of the present state."""
        embeddings = self.embeddings(self.tables, batch)
        return self.network.apply(
            self.params, self.network.state, batch.dense, embeddings, train=False
        )[0]

    def move_rows(self, batch: Batch, row_grads) -> None:
        """An optimizer step for the rows alone."""
        self.tables, self.states = self._move_rows(
            batch, self.tables, self.states, row_grads
        )

    def _move_rows(self, batch: Batch, tables, states, row_grads):
        tables, states = dict(tables), dict(states)
        for name, named in self._named(batch).items():
            tables[name], states[name] = update(
                self.specs[name].optimizer,
                tables[name],
                states[name],
                row_grads[name],
                named,
            )
        return tables, states

    def _step(self, batch: Batch, params, opt_state, tables, states):
        def loss(params, tables):
            embeddings = self.embeddings(tables, batch)
            logits, _ = self.network.apply(
                params, self.network.state, batch.dense, embeddings, train=True
            )
            losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
            weights = np.ones(batch.size) if batch.weights is None else batch.weights
            total = weights.sum()
            return jnp.sum(weights * losses) / (total if total else 1)

        value, (grads, row_grads) = jax.value_and_grad(loss, (0, 1))(params, tables)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        tables, states = self._move_rows(batch, tables, states, row_grads)
        return value, optax.apply_updates(params, updates), opt_state, tables, states

    def _named(self, batch: Batch) -> dict[str, np.ndarray]:
        values = dict(zip(batch.fixed_names, batch.fixed, strict=True)) | batch.jagged
        named = {n: np.zeros(len(k), bool) for n, k in self.keys.items()}
        for name, spec in self.features.items():
            bags = values[name]
            flat = bags.values if isinstance(bags, Jagged) else bags
            rows = bag_rows(self.keys[spec.table.name], flat)
            named[spec.table.name][rows[rows >= 0]] = True
        return named


def first_rows(features, keys, seed: int = 0) -> dict[str, np.ndarray]:
    """First values by table name, as a collection on one device makes them."""
    one_reader = {spec.table.name: name for name, spec in features.items()}
    readers = {name: features[name] for name in one_reader.values()}
    collection = EmbeddingCollection(readers, mesh=make_mesh("1x1"), seed=seed)
    batch = max(len(k) for k in keys.values())
    bags = {}
    for table, name in one_reader.items():
        lengths = np.zeros(batch, np.int32)
        lengths[: len(keys[table])] = 1
        bags[name] = Jagged(keys[table], lengths)
    plan = collection.plan(bags, batch, train=True)
    state = collection.apply_fills(collection.init(), plan)
    found = {t: collection.lookup_rows(state, t, k) for t, k in keys.items()}
    assert all(rows["found"].all() for rows in found.values())
    return {table: np.asarray(rows["rows"]) for table, rows in found.items()}


def embed_batch(collection, state, values, batch: int, *, train: bool = False) -> dict:
    """What a model would get of a batch: vectors by feature, all devices in order.

    Args:
      collection: the tables.
      state: its `EmbeddingState`; a training plan is not applied to it.
      values: by feature, as of `EmbeddingCollection.plan`.
      batch: examples.
      train: of the plan.
    """
    return run_plan(
        collection, state, collection.plan(values, batch, train=train), batch
    )


def run_plan(collection, state, plan, batch: int) -> dict:
    """As `embed_batch`, for a plan that has been made."""
    packed, layout = pack(collection.devices, plan.examples, plan.groups, plan.arrays)
    axes = jax.P(collection.axes)

    def local(state, packed):
        arrays = layout.unpack(packed[0])
        rows = collection.gather_rows(state, arrays)
        blocks = collection.embed(rows, arrays, layout)
        return split_features(layout, blocks, sequence_masks(layout, arrays))

    specs = (collection.state_spec(), axes)
    run = jax.shard_map(
        local, mesh=collection.mesh, in_specs=specs, out_specs=axes, check_vma=False
    )
    return jax.tree.map(lambda x: np.asarray(x)[:batch], jax.jit(run)(state, packed))

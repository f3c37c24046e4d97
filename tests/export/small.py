"""A small model to export, and bags of keys."""

import numpy as np
import optax

from shardjax.embed import EmbeddingCollection, FeatureSpec, Jagged, TableSpec
from shardjax.export import export_model, load_model
from shardjax.mesh import make_mesh
from shardjax.network import Network
from shardjax.state import init_state

SGD = optax.sgd(0.1)


def bag(rng, batch, keys, weighted=False):
    """Keys of which some are unseen, in bags of which some are empty."""
    lengths = rng.permutation(np.resize([2, 0, 3, 1, 13], batch))
    values = rng.integers(0, keys, int(lengths.sum()))
    if not weighted:
        return Jagged(values, lengths)
    weights = rng.normal(size=len(values))
    weights[::5] = 0
    weights[: lengths[0]] = 0
    return Jagged(values, lengths, weights)


def add(params, state, dense, embeddings, *, train):
    return embeddings["f"].sum(1) + dense.sum(1), state


def small(combiner="sum", network=None, **table):
    """A collection with one feature, and a network that adds up its vectors."""
    options = {k: table.pop(k) for k in ("max_length", "on_long") if k in table}
    options |= {k: table.pop(k) for k in ("padding_id", "on_bad_id") if k in table}
    item = TableSpec("item", 2, SGD, **table)
    spec = FeatureSpec(item, combiner=combiner, **options)
    collection = EmbeddingCollection(
        {"f": spec}, mesh=make_mesh("1x1"), initial_rows=64
    )
    network = network or Network(add, {}, {})
    state = init_state(network, SGD, collection)
    tables = collection.load_rows(
        state.tables,
        "item",
        np.arange(40),
        np.random.default_rng(0).normal(size=(40, 2)),
    )
    return collection, network, state.replace(tables=tables)


def exported(folder, collection, network, state, n_dense=1, **options):
    export_model(network, collection, state, folder, n_dense=n_dense, **options)
    return load_model(folder)

"""Steps refuse batches that are not theirs."""

import numpy as np
import optax
import pytest
from flax import nnx

import shardjax as sj
from shardjax import data, embed, models, train


def collection():
    table = embed.TableSpec("item", dim=4)
    features = {"item": embed.FeatureSpec(table), "other": embed.FeatureSpec(table)}
    return embed.EmbeddingCollection(features, mesh=sj.make_mesh("1x1"))


def batch(rows=8):
    keys = np.arange(2 * rows).reshape(2, rows)
    return data.Batch(np.arange(rows) % 2, np.ones((rows, 1)), keys, ("item", "other"))


def setup():
    tables = collection()
    model = models.DLRM(
        features=("item", "other"), n_dense=1, dim=4, top=(4,), rngs=nnx.Rngs(0)
    )
    network, tx = sj.from_nnx(model), optax.adam(1e-3)
    state = sj.init_state(network, tx, tables)
    return tables, network, tx, state, train.make_train_step(network, tx, tables)


def test_batches_of_evaluation_another_collection_or_twice_are_refused():
    tables, network, tx, state, step = setup()
    with pytest.raises(RuntimeError, match=r"prepared for evaluation \(train=False\)"):
        step(state, train.prepare(tables, batch(), train=False))
    with pytest.raises(RuntimeError, match="prepared by another collection"):
        step(state, train.prepare(collection(), batch(), train=True))
    prepared = train.prepare(tables, batch(), train=True)
    state, _ = step(state, prepared)
    with pytest.raises(RuntimeError, match="cannot be carried out after plan"):
        step(state, prepared)


def test_a_trained_collection_starts_no_second_state():
    tables, network, tx, state, step = setup()
    step(state, train.prepare(tables, batch(), train=True))
    with pytest.raises(RuntimeError, match="make a new EmbeddingCollection"):
        sj.init_state(network, tx, tables)


def test_rows_of_abandoned_batches_have_their_first_values():
    tables, _, _, state, step = setup()
    train.prepare(tables, batch(8), train=True)  # planned, never stepped on
    state, _ = step(state, train.prepare(tables, batch(16), train=True))
    found = tables.read_rows(state.tables, "item", np.arange(32, dtype=np.uint64))
    assert found["found"].all()
    assert (np.abs(found["rows"]).max(axis=1) > 0).all()

"""The common suite: every placement x mesh x optimizer x kind of feature equals the
unsharded reference. A new variant joins by a row in one of the lists below."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax.data.batch import Batch
from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Sequence,
    TableSpec,
    rowwise_adagrad,
)
from shardjax.embed.spec import Combiner, Placement
from shardjax.network import Network
from shardjax.state import init_state
from shardjax.train import make_train_step, prepare
from tests.embed.reference import (
    DenseTraining,
    dense_features,
    first_rows,
    random_bags,
    run_plan,
    wide_keys,
)

PLACEMENTS = ("row_wise", "table_wise", "data_parallel")

# One table and one slab each.
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "rowwise_adagrad": rowwise_adagrad(0.1, initial_accumulator=0.01),
    "adam": optax.adam(0.02),
    "adamw": optax.adamw(optax.linear_schedule(0.02, 0.01, 3), weight_decay=0.1),
    "lion": optax.lion(0.01),
}

# How features read each of these tables: combiner, and the kind of values.
READERS = {
    "one_key": ("sum", "fixed"),
    "one_key_again": ("mean", "fixed"),
    "sum": ("sum", "weighted"),
    "mean": ("mean", "weighted"),
    "mean_of_all": ("mean", "bags"),
    "sqrtn": ("sqrtn", "weighted"),
    "sequence": ("none", "bags"),
}

# A slab of which no feature has weights takes another path.
UNWEIGHTED = "unweighted"
UNWEIGHTED_READERS = {c: (c, "bags") for c in ("sum", "mean", "sqrtn")}

TABLES = {table: READERS for table in OPTIMIZERS} | {UNWEIGHTED: UNWEIGHTED_READERS}

DIM = 3
KEYS = wide_keys(16)  # no device asks one owner for more: one program fits all
SIZES = (14, 14, 5)  # the last batch leaves devices without an example
SEED = 11
CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # float32, other orders of summation


def make_features(placement: str, tables=tuple(TABLES)) -> dict[str, FeatureSpec]:
    features = {}
    for table in tables:
        tx = optax.sgd(0.1) if table == UNWEIGHTED else OPTIMIZERS[table]
        spec = TableSpec(table, DIM, tx, placement=placement)
        for reader, (combiner, _) in TABLES[table].items():
            features[f"{table}/{reader}"] = FeatureSpec(spec, combiner)
    return features


def apply(params, state, dense, embeddings, *, train):
    """tanh of everything, weighted; the place in a sequence counts."""
    vectors = []
    for value in embeddings.values():
        if isinstance(value, Sequence):
            places = jnp.cos(jnp.arange(value.mask.shape[1]))[None, :, None]
            kept = jnp.where(value.mask[..., None], value.values, 7.0)
            value = jnp.sum(kept * value.mask[..., None] * places, 1)
        vectors.append(value)
    hidden = jnp.tanh(jnp.stack(vectors, 1) + params["bias"])
    logits = jnp.einsum("bfd,fd->b", hidden, params["out"]) + dense @ params["dense"]
    return logits, state


@functools.cache
def make_network() -> Network:
    rng = np.random.default_rng(1)
    n = sum(map(len, TABLES.values()))
    params = {
        "bias": rng.normal(size=(1, 1, DIM)).astype(np.float32),
        "out": rng.normal(size=(n, DIM)).astype(np.float32) / 4,
        "dense": np.ones(2, np.float32),
    }
    return Network(apply, params, {})


@functools.cache
def make_batches() -> list[Batch]:
    rng = np.random.default_rng(3)
    batches = []
    for size in SIZES:
        fixed, jagged = {}, {}
        for table, readers in TABLES.items():
            for reader, (_, kind) in readers.items():
                name = f"{table}/{reader}"
                if kind == "fixed":
                    fixed[name] = rng.choice(KEYS[:9], size)
                else:
                    jagged[name] = random_bags(rng, size, KEYS, weighted=kind != "bags")
        batches.append(
            Batch(
                labels=rng.integers(0, 2, size),
                dense=rng.normal(size=(size, 2)),
                fixed=np.stack(list(fixed.values())),
                fixed_names=tuple(fixed),
                jagged=jagged,
                weights=rng.uniform(0.5, 2, size),
            )
        )
    return batches


def dense_tx() -> optax.GradientTransformation:
    return optax.adam(0.01)


@functools.cache
def reference_run() -> tuple[list[float], DenseTraining]:
    """Losses and final state of the run that all others must equal."""
    features = make_features("row_wise")
    keys = dict.fromkeys(TABLES, KEYS)
    rows = first_rows(features, keys, SEED)
    run = DenseTraining(features, make_network(), dense_tx(), keys, rows)
    losses = [run.step(batch) for batch in make_batches()]
    return losses, run


def test_lists_are_complete():
    assert set(PLACEMENTS) == set(get_args(Placement))
    assert {combiner for combiner, _ in READERS.values()} == set(get_args(Combiner))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_equals_the_reference(mesh, placement):
    losses, reference = reference_run()
    features = make_features(placement)
    collection = EmbeddingCollection(features, mesh=mesh, seed=SEED, initial_rows=16)
    network, tx = make_network(), dense_tx()
    state = init_state(network, tx, collection)
    step = make_train_step(network, tx, collection)
    for batch, expected in zip(make_batches(), losses, strict=True):
        state, info = step(state, prepare(collection, batch, train=True))
        np.testing.assert_allclose(info["loss"], expected, **CLOSE)
    assert int(state.step) == len(SIZES)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, **CLOSE),
        state.params,
        reference.params,
    )
    assert len(collection.groups) == len(TABLES)
    for group, slab in zip(collection.groups, state.tables, strict=True):
        sharding = jax.NamedSharding(mesh, collection.spec(group))
        assert slab.rows.sharding.is_equivalent_to(sharding, 2)
        (table,) = group.tables
        name = table.spec.name
        found = collection.lookup_rows(state.tables, name, KEYS)
        named = np.isin(KEYS, collection.keys(name))
        np.testing.assert_array_equal(found["found"], named)
        assert named.sum() > 13
        expected_rows, expected_shared = group.optimizer.split(reference.states[name])
        pairs = zip(
            [found["rows"], *found["row_state"]],
            [reference.tables[name], *expected_rows],
            strict=True,
        )
        for got, expected in pairs:
            np.testing.assert_allclose(
                got[named], expected[named], **CLOSE, err_msg=name
            )
        for got, expected in zip(slab.shared, expected_shared, strict=True):
            np.testing.assert_allclose(got, expected, **CLOSE, err_msg=name)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_vectors_equal_the_reference(mesh, placement):
    """Rows reach a model without rounding; pooling may sum in another order."""
    table = "rowwise_adagrad"
    features = make_features(placement, [table])
    collection = EmbeddingCollection(features, mesh=mesh, seed=SEED)
    tables = first_rows(features, {table: KEYS}, SEED)
    batch = make_batches()[0]
    values = dict(zip(batch.fixed_names, batch.fixed, strict=True)) | batch.jagged
    plan = collection.plan(values, batch.size, train=True)
    state = collection.apply_fills(collection.init(), plan)
    got = run_plan(collection, state, plan, batch.size)
    for name, expected in dense_features(
        features, {table: KEYS}, tables, batch
    ).items():
        if isinstance(expected, Sequence):
            length = expected.mask.shape[1]
            assert not got[name].mask[:, length:].any()
            assert not got[name].values[:, length:].any()
            np.testing.assert_array_equal(got[name].mask[:, :length], expected.mask)
            np.testing.assert_array_equal(got[name].values[:, :length], expected.values)
        elif name in batch.fixed_names:
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
        else:
            np.testing.assert_allclose(got[name], expected, **CLOSE, err_msg=name)

"""Training and evaluation steps, with models of every kind."""

from copy import copy
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from shardjax.data.batch import Batch
from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Index,
    Jagged,
    Sequence,
    TableSpec,
    rowwise_adagrad,
)
from shardjax.mesh import make_mesh
from shardjax.metrics import GAUC, Accuracy, LogLoss, Mean, Sum
from shardjax.network import Network, from_linen, from_nnx
from shardjax.state import compute_metrics, init_state, stack_metrics
from shardjax.train import (
    PreparedBatch,
    add_counters,
    binary_cross_entropy,
    evaluate,
    fit,
    make_apply_step,
    make_eval_step,
    make_train_step,
    prepare,
)
from tests.embed.reference import DenseTraining, first_rows, random_bags

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
DIM = 4
KEYS = np.arange(50, dtype=np.uint64)
TX = rowwise_adagrad(0.1, initial_accumulator=0.01)
ITEM = TableSpec("item", DIM, TX)
USER = TableSpec("user", DIM, TX, placement="data_parallel")
FEATURES = {
    "item": FeatureSpec(ITEM),
    "likes": FeatureSpec(ITEM, "mean"),
    "recent": FeatureSpec(ITEM, "none", max_length=6),
    "user": FeatureSpec(USER),
}
WIDTH = 4 * DIM + 2


def make_batch(seed: int, size: int, weights=True, keys=KEYS) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        labels=rng.integers(0, 2, size),
        dense=rng.normal(size=(size, 2)),
        fixed=rng.choice(keys, (2, size)),
        fixed_names=("item", "user"),
        jagged={
            "likes": random_bags(rng, size, keys, weighted=True),
            "recent": random_bags(rng, size, keys),
        },
        weights=rng.uniform(0.5, 2, size) if weights else None,
        groups=rng.integers(0, 4, size),
    )


def flat(dense, embeddings):
    """All inputs of a model in one array, [batch, WIDTH]."""
    parts = [dense]
    for vectors in embeddings.values():
        if isinstance(vectors, Sequence):
            vectors = jnp.sum(vectors.values * vectors.mask[..., None], 1)
        parts.append(vectors)
    return jnp.concatenate(parts, 1)


def plain_network() -> Network:
    def apply(params, state, dense, embeddings, *, train):
        hidden = jnp.tanh(flat(dense, embeddings) @ params["in"])
        return hidden @ params["out"], state

    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(WIDTH, 8)).astype(np.float32) / 4,
        "out": rng.normal(size=8).astype(np.float32),
    }
    return Network(apply, params, {})


def run_steps(
    mesh, network, batches, *, tx=None, metrics=None, features=FEATURES, **more
):
    """Trains on batches; returns the collection, the state and the losses."""
    tx = optax.adam(0.01) if tx is None else tx
    collection = EmbeddingCollection(features, mesh=mesh)
    state = init_state(network, tx, collection, metrics)
    step = make_train_step(network, tx, collection, **more)
    losses = []
    for batch in batches:
        state, info = step(state, prepare(collection, batch, train=True))
        losses.append(np.asarray(info["loss"]))
    return collection, state, losses


def read(collection, state) -> dict:
    """Everything a run has learnt, on the host."""
    tables = {
        name: collection.lookup_rows(state.tables, name, KEYS)
        for name in ("item", "user")
    }
    return jax.tree.map(np.asarray, {"params": state.params, "tables": tables})


def assert_close(a, b, **close):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **(CLOSE | close)), a, b)


# Batches on their way to the devices.


def test_prepared_batches_are_dealt_in_order_and_padded():
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("4x2"))
    batch = make_batch(0, 13)
    prepared = prepare(collection, batch, train=True)
    assert isinstance(prepared, PreparedBatch)
    assert (prepared.size, prepared.layout.examples) == (13, 2)
    assert prepared.packed.shape == (8, prepared.layout.words)
    assert len(prepared.packed.sharding.device_set) == 8
    unpacked = [prepared.layout.unpack(p) for p in np.asarray(prepared.packed)]
    for name, values in (
        ("labels", batch.labels),
        ("dense", batch.dense),
        ("weights", batch.weights),
    ):
        got = np.concatenate([arrays[name] for arrays in unpacked])
        np.testing.assert_array_equal(got[:13], values)
        assert not got[13:].any()
    assert "groups" not in unpacked[0]
    assert prepared.counters["examples"] == 13
    assert prepared.counters["padding_examples"] == 3
    assert prepared.counters["planner_ms"] == 1e3 * prepared.plan.seconds > 0


def test_prepared_batches_count_bad_lines_and_number_groups():
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("2x1"))
    batch = make_batch(0, 5, weights=False)
    batch = Batch(**{**vars(batch), "groups": [2**40, 7, 7, 2**40, 9], "bad_lines": 3})
    groups = Index()
    prepared = prepare(collection, batch, train=False, groups=groups)
    unpacked = [prepared.layout.unpack(p) for p in np.asarray(prepared.packed)]
    got = np.concatenate([arrays["groups"] for arrays in unpacked])
    assert got.tolist() == [0, 1, 1, 0, 2, 0]
    weights = np.concatenate([arrays["weights"] for arrays in unpacked])
    assert weights.tolist() == [1, 1, 1, 1, 1, 0]
    assert prepared.counters["bad_lines"] == 3
    assert len(groups) == 3


def test_a_missing_feature_is_refused():
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("1x1"))
    batch = make_batch(0, 5)
    del batch.jagged["recent"]
    with pytest.raises(ValueError, match=r"the batch lacks the features \['recent'\]"):
        prepare(collection, batch, train=True)


# The training step.


def clipped():
    """The optimizer of the parameters may look at all of them: rows are not among them."""
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))


@cache
def first_values():
    """The first values of all rows, by table."""
    return first_rows(FEATURES, {"item": KEYS, "user": KEYS})


@cache
def plain_run():
    """Batches, the losses they must have, and the reference after them."""
    batches = [make_batch(0, 14), make_batch(1, 14), make_batch(2, 5)]
    keys = {"item": KEYS, "user": KEYS}
    reference = DenseTraining(
        FEATURES, plain_network(), clipped(), keys, first_values()
    )
    return batches, [reference.step(batch) for batch in batches], reference


@pytest.mark.parametrize(
    ("mesh_shape", "microbatch_size"),
    [("1x1", None), ("1x1", 1), ("1x1", 4), ("1x1", 100), ("2x1", 3)],
)
def test_microbatches_change_nothing(mesh_shape, microbatch_size):
    """Also where they do not divide the batch, or are larger than it."""
    batches, expected, reference = plain_run()
    collection, state, losses = run_steps(
        make_mesh(mesh_shape),
        reference.network,
        batches,
        tx=clipped(),
        microbatch_size=microbatch_size,
        metrics={"examples": Sum("weights"), "loss": Mean("loss")},
    )
    np.testing.assert_allclose(losses, expected, **CLOSE)
    assert_close(state.params, reference.params)
    for name, table in reference.tables.items():
        got = collection.lookup_rows(state.tables, name, KEYS)
        wanted = np.asarray(table)[got["found"]]
        np.testing.assert_allclose(got["rows"][got["found"]], wanted, **CLOSE)
    values = compute_metrics(state.metrics)
    total = sum(float(batch.weights.sum()) for batch in batches)
    np.testing.assert_allclose(values["examples"], total, rtol=1e-6)


@pytest.mark.parametrize("size", [0, -1])
def test_bad_microbatches_are_refused(size):
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("1x1"))
    with pytest.raises(
        ValueError, match=f"`microbatch_size` must be positive, got {size}"
    ):
        make_train_step(
            plain_network(), optax.sgd(1.0), collection, microbatch_size=size
        )


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (
            lambda x: x,
            ValueError,
            r"logits of shape \[batch\] = \(6,\), the examples of a device, got \(6, 2\)",
        ),
        (lambda x: (x[:, 0], x), TypeError, "floats .*, got tuple. Return log-odds"),
        (lambda x: {"logits": x[:, 0]}, TypeError, "array of floats .*, got dict"),
        (lambda x: x.argmax(axis=1), TypeError, "array of floats .*, got int32"),
    ],
)
@pytest.mark.parametrize("train", [True, False])
def test_other_logits_are_refused(train, returned, error, message):
    def apply(params, state, dense, embeddings, *, train):
        return returned(dense), state

    network, tx = Network(apply, {"w": np.ones(1)}, {}), optax.sgd(0.1)
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("1x1"))
    state = init_state(network, tx, collection)
    batch = prepare(collection, make_batch(0, 6), train=train)
    if train:
        step, arguments = make_train_step(network, tx, collection), (state, batch)
    else:
        step, arguments = make_eval_step(network, collection), (state, {}, batch)
    with pytest.raises(error, match=message):
        step(*arguments)


def test_outputs_that_nobody_reads_go_on():
    """They stopped for good on 8 simulated devices."""
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("8x1"))
    network, tx = plain_network(), optax.sgd(0.1)
    state = init_state(network, tx, collection)
    apply = make_apply_step(network, collection)
    batch = prepare(collection, make_batch(0, 16), train=False)
    for _ in range(200):
        outputs = apply(state, batch)
    assert outputs.shape == (16,) and np.isfinite(outputs).all()


def test_a_batch_has_to_be_prepared():
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("1x1"))
    network, tx = plain_network(), optax.sgd(0.1)
    state = init_state(network, tx, collection)
    batch = make_batch(0, 6)
    message = "takes a prepared batch, got Batch. Prepare it with `prepare"
    with pytest.raises(TypeError, match=message):
        make_train_step(network, tx, collection)(state, batch)
    with pytest.raises(TypeError, match=message):
        make_eval_step(network, collection)(state, {}, batch)
    with pytest.raises(TypeError, match=message):
        make_apply_step(network, collection)(state, batch)


def test_logits_may_be_a_column_of_any_float():
    plain = plain_network()

    def apply(params, state, dense, embeddings, *, train):
        logits, state = plain.apply(params, state, dense, embeddings, train=train)
        return logits[:, None].astype(jnp.bfloat16).astype(jnp.float16), state

    batches = [make_batch(0, 14)]
    mesh = make_mesh("1x1")
    _, _, losses = run_steps(mesh, Network(apply, plain.params, {}), batches)
    _, _, expected = run_steps(mesh, plain, batches)
    assert losses[0].dtype == np.float32
    np.testing.assert_allclose(losses, expected, rtol=0.02)


@pytest.mark.parametrize("mesh_shape", ["1x1", "4x2"])
def test_examples_without_weight_have_no_part(mesh_shape):
    """Whatever their label; only their rows are made."""
    batch = make_batch(0, 14)
    weights = batch.weights.copy()
    weights[[1, 5, 13]] = 0
    labels = batch.labels.copy()
    labels[[1, 5, 13]] = np.nan, np.inf, -1e30
    changed = Batch(**{**vars(batch), "weights": weights, "labels": labels})
    kept = batch.take(np.flatnonzero(weights))
    mesh = make_mesh(mesh_shape)
    metrics = {"log_loss": LogLoss(), "accuracy": Accuracy(), "loss": Mean("loss")}
    runs = []
    for one in (changed, kept):
        collection, state, losses = run_steps(
            mesh, plain_network(), [one] * 2, metrics=metrics
        )
        learnt = read(collection, state)
        used = np.union1d(kept.fixed[0], kept.jagged["likes"].values)
        rows = learnt["tables"]["item"]["rows"][used.astype(int)]
        runs.append((losses, learnt["params"], rows, compute_metrics(state.metrics)))
        assert np.isfinite(losses).all()
    assert_close(*runs)


@pytest.mark.parametrize("mesh_shape", ["1x1", "4x2"])
@pytest.mark.parametrize("kind", ["no weight", "no example", "empty bags"])
def test_batches_with_nothing_in_them(mesh_shape, kind):
    """Zeros and no-ops, never NaN; also where some devices have nothing to do."""
    size = 0 if kind == "no example" else 3
    batch = make_batch(0, size)
    if kind == "no weight":
        batch = Batch(**{**vars(batch), "weights": np.zeros(size)})
    if kind == "empty bags":
        empty = Jagged(np.zeros(0, np.int64), np.zeros(size, np.int64))
        batch = Batch(**{**vars(batch), "jagged": {"likes": empty, "recent": empty}})
    mesh, network, tx = make_mesh(mesh_shape), plain_network(), optax.sgd(0.1)
    full = make_batch(1, 14)
    for order in ([batch, full], [full, batch]):
        collection = EmbeddingCollection(FEATURES, mesh=mesh)
        step = make_train_step(network, tx, collection)
        state = init_state(network, tx, collection)
        for one in order:
            if one is batch:
                before = read(collection, state)
            state, info = step(state, prepare(collection, one, train=True))
            if one is batch and kind != "empty bags":
                assert float(info["loss"]) == 0
                after = read(collection, state)
                jax.tree.map(
                    np.testing.assert_array_equal, before["params"], after["params"]
                )
                for name in ("item", "user"):
                    there = before["tables"][name]["found"]
                    for part in ("rows", "row_state"):
                        jax.tree.map(
                            lambda x, y, there=there: np.testing.assert_array_equal(
                                x[there], y[there]
                            ),
                            before["tables"][name][part],
                            after["tables"][name][part],
                        )
        assert int(state.step) == 2
        for leaf in jax.tree.leaves(read(collection, state)):
            assert np.isfinite(leaf).all()


def test_another_loss_and_prediction():
    def squared(logits, labels):
        return (logits - labels) ** 2

    batch = make_batch(0, 14)
    network = plain_network()
    metrics = {"loss": Mean("loss"), "prediction": Mean("predictions")}
    _, state, losses = run_steps(
        make_mesh("2x1"), network, [batch], loss=squared, predict=lambda x: 5 + 0 * x,
        metrics=metrics,
    )  # fmt: skip
    keys = {"item": KEYS, "user": KEYS}
    reference = DenseTraining(FEATURES, network, optax.sgd(0.1), keys, first_values())
    logits = reference.logits(batch)
    each = (logits - batch.labels) ** 2
    expected = (batch.weights * each).sum() / batch.weights.sum()  # pyright: ignore[reportOptionalOperand]
    np.testing.assert_allclose(losses, [expected], rtol=1e-5)
    values = compute_metrics(state.metrics)
    np.testing.assert_allclose(values["prediction"], 5)
    np.testing.assert_allclose(values["loss"], each.mean(), rtol=1e-5)


def test_the_default_loss_is_logistic():
    logits = jnp.array([-100.0, 0.0, 2.0, 100.0])
    labels = jnp.array([0.0, 0.25, 1.0, 0.0])
    expected = [0, np.log(2), np.log1p(np.exp(-2)), 100]
    np.testing.assert_allclose(
        binary_cross_entropy(logits, labels), expected, atol=1e-6
    )


# Batches and states that are not the step's.


def start(mesh_shape="1x1"):
    network, tx = plain_network(), optax.adam(0.01)
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh(mesh_shape))
    state = init_state(network, tx, collection)
    return collection, state, make_train_step(network, tx, collection)


def test_batches_of_evaluation_another_collection_or_twice_are_refused():
    collection, state, step = start()
    with pytest.raises(RuntimeError, match=r"prepared for evaluation \(train=False\)"):
        step(state, prepare(collection, make_batch(0, 8), train=False))
    other, _, _ = start()
    with pytest.raises(RuntimeError, match="prepared by another collection"):
        step(state, prepare(other, make_batch(0, 8), train=True))
    prepared = prepare(collection, make_batch(0, 8), train=True)
    state, _ = step(state, prepared)
    with pytest.raises(RuntimeError, match="cannot be carried out after plan"):
        step(state, prepared)


def test_a_trained_collection_starts_no_second_state():
    collection, state, step = start()
    step(state, prepare(collection, make_batch(0, 8), train=True))
    with pytest.raises(RuntimeError, match="make a new EmbeddingCollection"):
        init_state(plain_network(), optax.adam(0.01), collection)


def test_rows_of_abandoned_batches_have_their_first_values():
    collection, state, step = start()
    abandoned = make_batch(0, 8, keys=KEYS[:20])
    prepare(collection, abandoned, train=True)  # planned, never stepped on
    batch = prepare(collection, make_batch(1, 16, keys=KEYS[20:]), train=True)
    state, _ = step(state, batch)
    keys = np.unique(abandoned.fixed[0])
    found = collection.lookup_rows(state.tables, "item", keys)
    assert found["found"].all()
    rows = first_rows(FEATURES, {"item": keys, "user": keys})["item"]
    np.testing.assert_array_equal(found["rows"], rows)


# Users' models.


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, dense, embeddings):
        hidden = nnx.relu(self.hidden(self.norm(flat(dense, embeddings))))
        return self.out(self.dropout(hidden))[:, 0]


class LinenModel(linen.Module):
    norm: bool = False
    dropout: float = 0.0

    @linen.compact
    def __call__(self, dense, embeddings, train=False):
        x = flat(dense, embeddings)
        if self.norm:
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = linen.Dropout(self.dropout, deterministic=not train)(linen.Dense(8)(x))
        return linen.Dense(1)(jnp.tanh(x))[:, 0]


def make_model(kind: str):
    """A network, and how plain JAX calls the same model on one device's examples.

    The call is `(params, state, dense, embeddings, device) -> (logits, state)`.
    """
    if kind == "nnx":
        module = NnxModel(nnx.Rngs(3))
        graph, params, state = nnx.split(module, nnx.Param, ...)

        def call(params, state, dense, embeddings, device):  # pyright: ignore[reportRedeclaration]
            live = nnx.merge(graph, params, state, copy=True)
            live.train()
            key = live.dropout.rngs.key
            key[...] = jax.random.fold_in(key[...], device)
            logits = live(dense, embeddings)
            return logits, nnx.split(live, nnx.Param, ...)[2]

        return from_nnx(module), params, state, call
    norm, dropout = {
        "linen": (False, 0.0),
        "linen_norm": (True, 0.0),
        "linen_dropout": (True, 0.3),
    }[kind]
    module = LinenModel(norm, dropout)
    dense = jnp.zeros((1, 2))
    vectors = {"x": jnp.zeros((1, WIDTH - 2))}
    variables = module.init(jax.random.key(0), dense, vectors)
    rngs = {"dropout": jax.random.key(5)} if dropout else None
    network = from_linen(module, variables, "train", rngs)
    state = {k: v for k, v in variables.items() if k != "params"} | {"step": 0}

    def call(params, state, dense, embeddings, device):
        state = dict(state)
        step = state.pop("step")
        key = jax.random.fold_in(jax.random.key(5), device)
        logits, changed = module.apply(
            {"params": params, **state},
            dense,
            embeddings,
            train=True,
            mutable=list(state),
            rngs={"dropout": jax.random.fold_in(key, step)},
        )
        return logits, {**changed, "step": step + 1}

    return network, variables["params"], state, call


@pytest.mark.parametrize(
    ("kind", "mesh_shape"),
    [
        ("nnx", "1x1"),
        ("nnx", "2x1"),
        ("linen", "1x1"),
        ("linen_norm", "1x2"),
        ("linen_dropout", "2x1"),
    ],
)
def test_models_train_as_in_plain_jax(kind, mesh_shape):
    """Every device has its own dropout and statistics; statistics are averaged."""
    network, params, model_state, call = make_model(kind)
    mesh = make_mesh(mesh_shape)
    part = 12 // mesh.size
    batches = [make_batch(i, 12) for i in range(2)]
    keys = {"item": KEYS, "user": KEYS}
    tx = optax.adam(0.01)
    reference = DenseTraining(FEATURES, network, tx, keys, first_values())
    opt_state = tx.init(params)

    def loss_of(batch, params, tables, state):
        embeddings = reference.embeddings(tables, batch)
        total, states = 0.0, []
        for device in range(mesh.size):
            mine = slice(device * part, (device + 1) * part)
            local = jax.tree.map(lambda x: x[mine], embeddings)  # noqa: B023
            logits, new = call(params, state, batch.dense[mine], local, device)
            losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels[mine])
            total += jnp.sum(batch.weights[mine] * losses)
            states.append(new)
        return total / batch.weights.sum(), states

    losses = []
    for batch in batches:
        grad_of = jax.value_and_grad(partial(loss_of, batch), (0, 1), has_aux=True)
        (value, states), (grads, row_grads) = jax.jit(grad_of)(
            params, reference.tables, model_state
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        reference.move_rows(batch, row_grads)
        model_state = average(states, model_state)
        losses.append(float(value))

    collection, state, got = run_steps(mesh, network, batches, tx=tx)
    np.testing.assert_allclose(got, losses, rtol=1e-4)
    # statistics of six examples, and Adam, make rounding visible
    close = {"rtol": 1e-4, "atol": 1e-5}
    assert_close(jax.tree.leaves(state.params), jax.tree.leaves(params), **close)
    for name in keys:
        rows = collection.lookup_rows(state.tables, name, KEYS)
        wanted = np.asarray(reference.tables[name])[rows["found"]]
        np.testing.assert_allclose(rows["rows"][rows["found"]], wanted, **close)
    floats = [
        [x for x in jax.tree.leaves(s) if jnp.issubdtype(x.dtype, jnp.floating)]
        for s in (state.model_state, jax.tree.map(jnp.asarray, model_state))
    ]
    assert len(floats[0]) == (0 if kind == "linen" else 2)
    assert_close(*floats)

    # and evaluation reads those statistics, without dropout
    batch = make_batch(9, 12)
    step = make_eval_step(network, collection)
    prepared = prepare(collection, batch, train=False)
    first, second = (step(state, {}, prepared)[1] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    for name in keys:  # unseen keys read zeros
        seen = collection.lookup_rows(state.tables, name, KEYS)["found"]
        reference.tables[name] = jnp.where(seen[:, None], reference.tables[name], 0)
    embeddings = reference.embeddings(reference.tables, batch)
    logits, _ = network.apply(
        state.params, state.model_state, batch.dense, embeddings, train=False
    )
    np.testing.assert_allclose(first, jax.nn.sigmoid(logits), **close)


def average(states, before):
    """The state after a step: keys as before, statistics averaged, counts as they are."""

    def share(old, *new):
        if jnp.issubdtype(jnp.asarray(new[0]).dtype, jax.dtypes.prng_key):
            return old
        if jnp.issubdtype(jnp.asarray(new[0]).dtype, jnp.floating):
            return sum(new) / len(new)
        return new[0]

    return jax.tree.map(share, before, *states)


# Evaluation.


@cache
def run_with_sgd():
    """Batches, and the reference after them."""
    batches, keys = [make_batch(0, 14)] * 2, {"item": KEYS, "user": KEYS}
    tx = optax.sgd(0.1)
    reference = DenseTraining(FEATURES, plain_network(), tx, keys, first_values())
    for batch in batches:
        reference.step(batch)
    return batches, reference


def test_predictions_are_those_of_the_reference(mesh):
    batches, trained = run_with_sgd()
    network, reference = trained.network, copy(trained)
    collection, state, _ = run_steps(mesh, network, batches, tx=optax.sgd(0.1))
    reference.tables = {}
    for name, table in trained.tables.items():  # unseen keys read zeros
        seen = collection.lookup_rows(state.tables, name, KEYS)["found"]
        reference.tables[name] = jnp.where(seen[:, None], table, 0)
    step = make_eval_step(network, collection)
    metrics = {"examples": Sum("weights"), "log_loss": LogLoss(), "gauc": GAUC(8)}
    evaluated = [make_batch(5, 14), make_batch(6, 5)]
    groups = Index()
    prepared = [prepare(collection, b, train=False, groups=groups) for b in evaluated]
    got, counters = evaluate(step, state, prepared, metrics, mesh)
    assert counters["examples"] == 19
    assert counters["ids"] == sum(b.fixed.size + _ids(b) for b in evaluated)
    assert counters["inserted"] == 0
    assert counters["unseen"] > 0
    predictions = []
    for batch, p in zip(evaluated, prepared, strict=True):
        logits = np.asarray(reference.logits(batch))
        predictions.append(1 / (1 + np.exp(-logits)))
        _, mine = step(state, {}, p)
        np.testing.assert_allclose(mine[: p.size], predictions[-1], **CLOSE)
        assert mine.shape == (mesh.size * p.layout.examples,)
    labels = np.concatenate([b.labels for b in evaluated])
    weights = np.concatenate([b.weights for b in evaluated])
    p = np.concatenate(predictions)
    log_loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    values = compute_metrics(got)
    np.testing.assert_allclose(values["examples"], weights.sum(), rtol=1e-6)
    expected = (weights * log_loss).sum() / weights.sum()
    np.testing.assert_allclose(values["log_loss"], expected, rtol=1e-5)
    assert 0 <= values["gauc"] <= 1


def _ids(batch: Batch) -> int:
    return sum(len(bags.values) for bags in batch.jagged.values())


@pytest.mark.parametrize("mesh_shape", ["1x1", "4x2"])
def test_evaluation_between_prefetched_batches_sees_applied_rows_alone(mesh_shape):
    """A loader plans ahead of the step; evaluation must not know."""
    mesh, network, tx = make_mesh(mesh_shape), plain_network(), optax.sgd(0.1)
    batches = [make_batch(i, 14, keys=KEYS[10 * i : 10 * i + 20]) for i in range(4)]
    evaluated = make_batch(9, 14)
    results = []
    for ahead in (0, 3):
        collection = EmbeddingCollection(FEATURES, mesh=mesh, initial_rows=2)
        state = init_state(network, tx, collection)
        step = make_train_step(network, tx, collection)
        look = make_eval_step(network, collection)
        waiting, todo, seen = [], list(batches), []
        while todo or waiting:
            while todo and len(waiting) <= ahead:
                waiting.append(prepare(collection, todo.pop(0), train=True))
            prepared = prepare(collection, evaluated, train=False)
            predictions = look(state, {}, prepared)[1]
            seen.append((prepared.counters["unseen"], np.asarray(predictions)))
            state, _ = step(state, waiting.pop(0))
        results.append((seen, read(collection, state)))
    counts = [count for count, _ in results[0][0]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == evaluated.fixed.size + _ids(evaluated)
    assert counts[-1] < counts[0]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_metrics_of_an_evaluation_step_are_donated():
    mesh, network = make_mesh("2x1"), plain_network()
    collection, state, _ = run_steps(mesh, network, [make_batch(0, 14)])
    step = make_eval_step(network, collection)
    metrics = stack_metrics({"n": Sum("weights")}, mesh)
    prepared = prepare(collection, make_batch(1, 14), train=False)
    after, _ = step(state, metrics, prepared)
    assert all(x.is_deleted() for x in jax.tree.leaves(metrics))
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, after)))


# The loop.


def fake_step(state, batch):
    return state + [batch.size], {"loss": float(batch.size)}


def fake_batches(sizes):
    for size in sizes:
        counters = {"examples": size, "exchange_imbalance": 1 + size / 10}
        yield PreparedBatch(None, None, None, size, counters)


def test_fit_steps_through_all_batches():
    state, counters = fit(fake_step, [], fake_batches([3, 9, 4]))
    assert state == [3, 9, 4]
    assert counters == {"examples": 16, "exchange_imbalance": 1.9}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_fit_stops_without_reading_further(steps):
    batches = fake_batches([3, 9, 4])
    state, _ = fit(fake_step, [], batches, steps=steps)
    assert state == [3, 9, 4][:steps]
    assert [batch.size for batch in batches] == [3, 9, 4][steps:]


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match="`steps` must not be negative, got -1"):
        fit(fake_step, [], fake_batches([3]), steps=-1)


def test_hooks_see_every_step():
    seen = []

    def hook(taken, state, info):
        seen.append((taken, list(state), info["loss"], info["size"], info["counters"]))

    fit(fake_step, [], fake_batches([3, 9]), hooks=iter([hook, hook]))
    assert [s[:4] for s in seen] == [
        (1, [3], 3.0, 3),
        (1, [3], 3.0, 3),
        (2, [3, 9], 9.0, 9),
        (2, [3, 9], 9.0, 9),
    ]
    assert seen[0][4]["examples"] == 3


def test_counters_are_summed_and_imbalance_is_not():
    total: dict[str, float] = {}
    for more in ({"a": 1, "exchange_imbalance": 1.5}, {"a": 2, "b": 3}):
        add_counters(total, more)
    add_counters(total, {"exchange_imbalance": 1.2})
    assert total == {"a": 3, "b": 3, "exchange_imbalance": 1.5}


# Determinism.


@pytest.mark.parametrize("mesh_shape", ["1x1", "8x1"])
def test_a_run_is_repeated_to_the_bit(mesh_shape):
    network = from_nnx(NnxModel(nnx.Rngs(3)))
    runs = []
    for _ in range(2):
        batches = [make_batch(i, n) for i, n in enumerate((14, 14, 5))]
        collection, state, losses = run_steps(
            make_mesh(mesh_shape), network, batches, metrics={"loss": LogLoss()}
        )
        values = compute_metrics(state.metrics)
        runs.append(jax.tree.map(np.asarray, (read(collection, state), losses, values)))
    jax.tree.map(np.testing.assert_array_equal, *runs)

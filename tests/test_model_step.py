"""Models that look their tables up themselves, next to ZeRO."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardjax as sj
from shardjax import zero
from shardjax.embed.in_graph import lookup
from tests.helpers import collectives, table_sized

USERS, ITEMS, DIM, BATCH = 13, 50, 8, 16
SLOTS = 7919  # a size that no other array has
ADAGRAD = optax.adagrad(0.1)


class TwoTower(nnx.Module):
    """Users and the items that they have seen, against an item."""

    def __init__(self, Embed, Bag, rngs):
        self.user = Embed(USERS, DIM, rngs=rngs)
        self.item = Embed(ITEMS, DIM, rngs=rngs)
        self.history = Bag(ITEMS, DIM, rngs=rngs)
        self.query = nnx.Linear(2 * DIM, DIM, rngs=rngs)
        self.candidate = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, batch):
        seen = self.history(batch["history"])
        query = self.query(jnp.concatenate([self.user(batch["user"]), seen], -1))
        return jnp.sum(query * self.candidate(self.item(batch["item"])), -1)


class DenseBag(nnx.Embed):
    """The sum of the rows that are no padding."""

    def __call__(self, ids):
        rows = super().__call__(jnp.maximum(ids, 0))
        return jnp.sum(jnp.where((ids >= 0)[..., None], rows, 0), -2)


def Bag(*args, **kwargs):
    return sj.embed.EmbeddingBag(*args, padding_id=-1, **kwargs)


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, 3, BATCH, dtype=np.int32),
        "item": np.minimum(rng.zipf(1.4, BATCH), ITEMS).astype(np.int32) - 1,
        "history": rng.integers(-1, 9, (BATCH, 3), dtype=np.int32),
        "label": rng.integers(0, 2, BATCH).astype(np.float32),
        "weight": rng.uniform(0, 2, BATCH).astype(np.float32),
    }


def loss_of(model, batch):
    losses = optax.sigmoid_binary_cross_entropy(model(batch), batch["label"])
    return jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])


def make_tx():
    """As users write it: another rate for some of the parameters."""

    def label(params):
        def of(path, _):
            return "slow" if "bias" in sj.partition.leaf_path(path) else "fast"

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.multi_transform(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.01)}, label
    )


def make_training(mesh, stage, optimizer, *, microbatches=1, precision="f32"):
    model = TwoTower(sj.embed.Embed, Bag, nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tables = sj.embed.plan_tables(
        params, sj.embed.table_paths(model), optimizer, mesh=mesh
    )
    tx = make_tx()
    plan = zero.plan_zero(
        tables.split(params),
        tx,
        mesh,
        stage,
        axes=tables.axes,
        min_bytes=0,
        precision=precision,
    )

    def loss(params, batch):
        return loss_of(nnx.merge(graph, params, rest), batch)

    state = sj.init_model_state(params, tx, tables, plan)
    step = sj.make_model_step(loss, tx, tables, plan, microbatches=microbatches)
    return step, state, tables


@pytest.fixture(scope="module")
def dense():
    """Losses and parameters of three steps of a model with nnx.Embed and plain optax.

    Rows have Adagrad, which does not move those without a gradient."""
    model = TwoTower(nnx.Embed, DenseBag, nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def kind(path, _):
        return "rows" if "embedding" in sj.partition.leaf_path(path) else "rest"

    labels = jax.tree_util.tree_map_with_path(kind, params)
    tx = optax.multi_transform(
        {"rows": optax.adagrad(0.1), "rest": make_tx()}, lambda _: labels
    )

    @jax.jit
    def step(params, opt_state, batch):
        def loss(params):
            total, weight = loss_of(nnx.merge(graph, params, rest), batch)
            return total / weight

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    opt_state, values = tx.init(params), []
    for seed in (0, 1, 0):
        value, params, opt_state = step(params, opt_state, make_batch(seed))
        values.append(value)
    return values, params


@pytest.mark.parametrize(
    ("shape", "stage", "microbatches"),
    [("1x1", 0, 2), ("8x1", 2, 1), ("4x2", 1, 2), ("2x4", 3, 1)],
)
def test_two_towers_train_as_with_nnx_embed(dense, shape, stage, microbatches):
    step, state, tables = make_training(
        sj.make_mesh(shape), stage, ADAGRAD, microbatches=microbatches
    )
    for seed, value in zip((0, 1, 0), dense[0], strict=True):
        state, info = step(state, make_batch(seed))
        np.testing.assert_allclose(info["loss"], value, rtol=1e-4)
        assert int(info["bad_ids"]) == 0
    assert int(state.step) == 3
    got = tables.join(state.params, state.tables)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(dense[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_bad_ids_are_counted_and_make_the_loss_nan():
    step, state, _ = make_training(sj.make_mesh("2x1"), 0, ADAGRAD)
    batch = make_batch()
    batch["item"][[0, 9]] = ITEMS, -1
    state, info = step(state, batch)
    assert int(info["bad_ids"]) == 2 and np.isnan(info["loss"])


def test_a_step_that_overflows_moves_nothing():
    step, state, tables = make_training(
        sj.make_mesh("2x1"), 0, optax.adam(0.1), precision="f16"
    )
    before = jax.device_get((state.params, state.tables))
    batch = make_batch()
    overflowing = batch | {"weight": np.full(BATCH, np.inf, np.float32)}
    state, info = step(state, overflowing)
    assert int(info["skipped"]) == 1
    after = jax.device_get((state.params, state.tables))
    for path in before[1]:
        np.testing.assert_array_equal(after[1][path].rows, before[1][path].rows)
        np.testing.assert_array_equal(after[1][path].shared, before[1][path].shared)
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    state, info = step(state, batch)
    assert int(info["skipped"]) == 1 and np.isfinite(info["loss"])
    rows = state.tables["user/embedding/value"].rows
    assert (np.asarray(rows) != before[1]["user/embedding/value"].rows).any()


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("shape", "keyed"), [("1x1", False), ("8x1", False), ("8x1", True)]
)
def test_no_operation_is_as_large_as_a_table(shape, keyed):
    mesh, tx = sj.make_mesh(shape), optax.sgd(0.1)
    params = {"t": np.ones((SLOTS * mesh.size, 6), np.float32), "w": np.ones(6)}
    known = {"t": sj.embed.DeviceVocabulary("t")} if keyed else None
    tables = sj.embed.plan_tables(
        params, ["t"], optax.adam(0.1), mesh=mesh, vocabularies=known
    )
    plan = zero.plan_zero(tables.split(params), tx, mesh, 0, axes=tables.axes)

    def loss(params, ids):
        rows = lookup(params["t"], ids, padding_id=-1)
        return jnp.sum((rows @ params["w"]) ** 2), jnp.float32(len(ids))

    step = sj.make_model_step(loss, tx, tables, plan, microbatches=2)
    state = sj.init_model_state(params, tx, tables, plan)
    batch, sizes = np.zeros(BATCH, np.int32), {SLOTS}
    if keyed:
        batch, keys = sj.embed.keys_for("t", batch), state.tables["t"].keys
        sizes |= {x.addressable_shards[0].data.size for x in (keys.hi, keys.passed)}
    compiled = step.jitted.lower(state, batch).compile()
    assert [table_sized(compiled, size) for size in sizes] == [[]] * len(sizes)
    local = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(local) - 64
    assert memory.temp_size_in_bytes < SLOTS
    found = collectives(compiled)
    assert found["all-to-all"] == 0
    assert (mesh.size == 1) == (found["reduce-scatter"] + found["all-gather"] == 0)


def test_tables_of_another_mesh_are_refused():
    step, _, _ = make_training(sj.make_mesh("2x1"), 0, ADAGRAD)
    _, state, _ = make_training(sj.make_mesh("1x1"), 0, ADAGRAD)
    with pytest.raises(ValueError, match="same plan"):
        step(state, make_batch())


def test_what_does_not_fit_together_is_refused():
    params = {"t": np.ones((8, 2), np.float32), "w": np.ones(2, np.float32)}
    mesh, tx = sj.make_mesh("4x2"), optax.sgd(0.1)
    tables = sj.embed.plan_tables(params, ["t"], tx, mesh=mesh)
    plan = zero.plan_zero(tables.split(params), tx, mesh, 0)

    def loss(params, batch):
        return jnp.float32(0), jnp.float32(1)

    message = r"same devices, got axes \('data', 'model'\).* and axes \('data',\)"
    with pytest.raises(ValueError, match=message):
        sj.make_model_step(loss, tx, tables, plan)
    with pytest.raises(ValueError, match=message):
        sj.init_model_state(params, tx, tables, plan)
    tables = sj.embed.plan_tables(params, ["t"], tx, mesh=mesh, axes=("data",))
    with pytest.raises(ValueError, match="`microbatches` must be positive, got 0"):
        sj.make_model_step(loss, tx, tables, plan, microbatches=0)
    with pytest.raises(ValueError, match="inside jax.shard_map.*make_model_step"):
        tables.value_and_grad(loss)(
            tables.split(params), tables.init(params), np.arange(4)
        )

"""Rows over a mesh: their first values, updates, growth, and hard sets of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax.data.batch import Batch
from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Jagged,
    TableSpec,
    rowwise_adagrad,
    uniform,
    zeros,
)
from shardjax.embed.span import DeviceSpan
from shardjax.embed.translate import owners_of
from shardjax.mesh import make_mesh
from shardjax.network import Network
from shardjax.state import init_state
from shardjax.train import make_train_step, prepare
from tests.embed.reference import (
    DenseTraining,
    first_rows,
    random_bags,
    run_plan,
    unmix64,
    wide_keys,
)

PLACEMENTS = ("row_wise", "table_wise", "data_parallel")
WIDE = [
    0,
    1,
    2**31,
    2**32,
    2**32 + 5,
    5,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**64 - 1,
    -1 - 2**62,
]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def everywhere(keys) -> dict[str, np.ndarray]:
    return {placement: np.asarray(keys) for placement in PLACEMENTS}


ADAGRAD = rowwise_adagrad(0.1, initial_accumulator=0.01)


def one_of_each(dim=3, tx=ADAGRAD, **more) -> dict[str, FeatureSpec]:
    """A table per placement, each read by one feature of its name."""
    return {
        p: FeatureSpec(TableSpec(p, dim, tx, placement=p, **more)) for p in PLACEMENTS
    }


def plan_and_fill(collection, values, batch, state=None):
    plan = collection.plan(values, batch, train=True)
    state = collection.init() if state is None else state
    return collection.apply_fills(state, plan)


def read_all(collection, state, keys) -> dict[str, np.ndarray]:
    found = {p: collection.lookup_rows(state, p, keys) for p in PLACEMENTS}
    assert all(rows["found"].all() for rows in found.values())
    return {p: rows["rows"] for p, rows in found.items()}


# First values.


def test_first_values_depend_on_seed_table_and_key_alone(mesh):
    keys = wide_keys(300)
    features = one_of_each()
    expected = first_rows(features, everywhere(keys), seed=5)
    rng = np.random.default_rng(mesh.size)
    order = rng.permutation(keys)
    collection = EmbeddingCollection(features, mesh=mesh, seed=5, initial_rows=8)
    state = None
    for part in np.split(order, [1, 40]):  # other batches, in another order
        state = plan_and_fill(collection, everywhere(part), len(part), state)
    for placement, rows in read_all(collection, state, keys).items():
        np.testing.assert_array_equal(rows, expected[placement])
        assert len(np.unique(rows, axis=0)) == len(keys)


def test_first_values_differ_by_seed_and_table():
    keys = wide_keys(50)
    features = one_of_each()
    runs = [
        first_rows(features, everywhere(keys), seed=s) for s in (0, 1, -1, 2**64 + 1)
    ]
    rows = np.stack([rows[p] for rows in runs[:3] for p in PLACEMENTS])
    assert len(np.unique(rows.reshape(-1, 3), axis=0)) == len(rows) * len(keys)
    for placement in PLACEMENTS:  # seeds are 64 bits
        np.testing.assert_array_equal(runs[3][placement], runs[1][placement])


def test_random_bits_of_a_key_do_not_change():
    """Checkpoints and reruns rely on them: another function is another release."""
    collection = EmbeddingCollection(
        {"x": FeatureSpec(TableSpec("item", 1))}, mesh=make_mesh("1x1"), seed=3
    )
    plan = collection.plan({"x": np.array([0, 7, -1])}, 3, train=True)
    words = [int(w) for w in plan.fills[0].words[0, :3]]
    assert words == [0x09CA876031C7AC1D, 0xA58BA90A44595CFF, 0x2F4A8D58F3B55074]


@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [
        (zeros(), 0, 0),
        (uniform(0.5), -0.5, 0.5),
        (jax.nn.initializers.constant(2.0), 2, 2),
        (jax.nn.initializers.normal(0.1), -1, 1),
    ],
)
def test_initializers_make_the_rows(initializer, low, high):
    spec = TableSpec("item", 5, initializer=initializer)
    collection = EmbeddingCollection({"x": FeatureSpec(spec)}, mesh=make_mesh("2x1"))
    keys = wide_keys(600)
    state = plan_and_fill(collection, {"x": keys}, 600)
    rows = collection.lookup_rows(state, "item", keys)["rows"]
    assert low <= rows.min() <= rows.max() <= high
    if low < high:
        assert rows.std() > 0.05
        assert len(np.unique(rows)) > 2500


def test_tables_of_a_slab_keep_their_own_initializers():
    features = {
        "one": FeatureSpec(TableSpec("one", 2, initializer=jax.nn.initializers.ones)),
        "zero": FeatureSpec(TableSpec("zero", 2, initializer=zeros())),
        "any": FeatureSpec(TableSpec("any", 2)),
    }
    collection = EmbeddingCollection(features, mesh=make_mesh("4x2"))
    assert len(collection.groups) == 1
    keys = np.arange(40)
    state = plan_and_fill(collection, dict.fromkeys(features, keys), 40)
    rows = {t: collection.lookup_rows(state, t, keys)["rows"] for t in features}
    np.testing.assert_array_equal(rows["one"], 1)
    np.testing.assert_array_equal(rows["zero"], 0)
    assert (rows["any"] != 0).all()


# Keys.


def test_wide_keys_have_rows_of_their_own(mesh):
    keys = np.array([k % 2**64 for k in WIDE], np.uint64)
    collection = EmbeddingCollection(one_of_each(), mesh=mesh)
    state = plan_and_fill(collection, everywhere(keys), len(keys))
    for placement, rows in read_all(collection, state, keys).items():
        assert len(np.unique(rows, axis=0)) == len(keys)
        assert set(collection.keys(placement)) == set(keys)
        absent = collection.lookup_rows(state, placement, keys ^ np.uint64(2**40))
        assert not absent["found"].any()
        assert not absent["rows"].any()


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_narrow_keys_are_widened(dtype):
    spec = TableSpec("item", 2, optax.sgd(0.1))
    features = {"x": FeatureSpec(spec), "y": FeatureSpec(spec, "mean")}
    keys = np.array([0, 1, 127], dtype)
    if dtype.startswith("i"):
        keys[1] = -1
    bags = Jagged(keys, np.array([1, 0, 2]))
    collection = EmbeddingCollection(features, mesh=make_mesh("1x1"))
    state = plan_and_fill(collection, {"x": keys, "y": bags}, 3)
    assert len(collection.keys("item")) == 3
    for same in (keys, keys.astype(np.int64), [int(k) for k in keys]):
        assert collection.lookup_rows(state, "item", same)["found"].all()


def test_equal_keys_of_two_tables_are_two_rows():
    spec = [TableSpec(name, 2) for name in "ab"]
    features = {s.name: FeatureSpec(s) for s in spec}
    collection = EmbeddingCollection(features, mesh=make_mesh("2x1"))
    state = plan_and_fill(collection, dict.fromkeys("ab", np.arange(9)), 9)
    rows = [collection.lookup_rows(state, name, np.arange(9))["rows"] for name in "ab"]
    assert (rows[0] != rows[1]).all()


@pytest.mark.parametrize(
    ("table", "keys", "error", "message"),
    [
        ("user", [1], KeyError, "no table is named 'user'; the tables are "),
        (
            "row_wise",
            [1.5],
            TypeError,
            "keys of `row_wise` must be integers, got dtype f",
        ),
    ],
)
def test_reading_what_is_not_there_is_refused(table, keys, error, message):
    collection = EmbeddingCollection(one_of_each(), mesh=make_mesh("1x1"))
    state = collection.init()
    with pytest.raises(error, match=message):
        collection.lookup_rows(state, table, np.array(keys))
    if error is KeyError:
        with pytest.raises(error, match=message):
            collection.keys(table)


# Placement and growth.


def test_rows_lie_where_their_placement_says():
    mesh = make_mesh("4x2")
    collection = EmbeddingCollection(one_of_each(), mesh=mesh, initial_rows=128)
    keys = wide_keys(800)
    plan = collection.plan(everywhere(keys), 800, train=True)
    spread, whole, copied = (
        next(used for used, g in zip(plan.slots_used, collection.groups, strict=True)
             if p in {t.spec.name for t in g.tables})
        for p in PLACEMENTS
    )  # fmt: skip
    assert spread is whole  # one slab
    assert copied.tolist() == [800]
    entry = collection.planner.tables[0][1].table
    assert entry.spec.name == "table_wise"
    by_hash = spread.copy()
    by_hash[entry.owner] -= 800
    assert by_hash.sum() == 800
    assert by_hash.min() > 60  # of 100 expected
    state = collection.apply_fills(collection.init(), plan)
    assert state[0].rows.shape == (8 * 1024, 3)  # grown to hold 800 + 100 on one device
    assert state[0].rows.sharding.shard_shape(state[0].rows.shape) == (1024, 3)
    assert state[1].rows.shape == (1024, 3)
    assert state[1].rows.sharding.is_fully_replicated


def test_owners_are_ranges_of_buckets():
    """More devices cut the ranges finer: what one of 4 owns, 2 of 8 own."""
    keys = wide_keys(2000)
    owners = {}
    for devices in (1, 3, 4, 8):
        owners[devices] = owners_of(keys, -1, DeviceSpan.whole(devices))
        counts = np.bincount(owners[devices], minlength=devices)
        assert counts.min() > 0.8 * len(keys) / devices
    np.testing.assert_array_equal(owners[8] // 2, owners[4])
    assert not owners[1].any()


@pytest.mark.parametrize("mesh_shape", ["1x1", "2x4"])
def test_growth_keeps_rows_and_state(mesh_shape):
    tx = optax.adagrad(0.1, initial_accumulator_value=0.5)
    collection = EmbeddingCollection(
        one_of_each(tx=tx), mesh=make_mesh(mesh_shape), initial_rows=1
    )
    keys = wide_keys(700)
    expected = first_rows(one_of_each(tx=tx), everywhere(keys))
    state = None
    for part in np.split(keys, [3, 30, 300]):
        state = plan_and_fill(collection, everywhere(part), len(part), state)
    for placement in PLACEMENTS:
        got = collection.lookup_rows(state, placement, keys)
        np.testing.assert_array_equal(got["rows"], expected[placement])
        np.testing.assert_array_equal(got["row_state"][0], np.full((700, 3), 0.5))
        assert len(collection.keys(placement)) == 700


# Updates.


def linear_network(factors: int) -> Network:
    """logit of an example = sum of its first `factors` vectors times its dense values."""

    def apply(params, state, dense, embeddings, *, train):
        total = sum(jnp.sum(v, 1) for v in embeddings.values())
        return total * dense[:, 0], state

    return Network(apply, {"unused": np.zeros(factors, np.float32)}, {})


def train(collection, network, batches, tx=None, **more):
    """Trains on batches; the loss is the logit, so gradients are what `dense` says."""
    tx = optax.sgd(0.1) if tx is None else tx
    step = make_train_step(network, tx, collection, **more)
    state = init_state(network, tx, collection)
    losses = []
    for batch in batches:
        state, info = step(state, prepare(collection, batch, train=True))
        losses.append(float(info["loss"]))
    return state, losses


def logit_loss(logits, labels):
    return logits


def one_feature_batch(keys, dense, **more) -> Batch:
    fixed = np.stack([keys] * 3)
    return Batch(np.zeros(len(keys)), dense, fixed, PLACEMENTS, **more)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_duplicates_are_summed_before_one_update(mesh, order):
    """[3, 3, 3] with gradients g0, g1, g2 is one row-wise Adagrad step with their sum."""
    features = one_of_each(tx=rowwise_adagrad(0.1), initializer=zeros())
    collection = EmbeddingCollection(features, mesh=mesh)
    g = np.array([1.0, 2.0, -0.5])
    batch = one_feature_batch(np.full(3, 3), g[order][:, None])
    state, losses = train(collection, linear_network(1), [batch], loss=logit_loss)
    assert losses == [0]
    total = g.sum() / 3  # the loss is a mean
    for placement in PLACEMENTS:
        got = collection.lookup_rows(state.tables, placement, np.array([3]))
        np.testing.assert_allclose(got["row_state"][0], [total**2], rtol=1e-6)
        np.testing.assert_allclose(got["rows"], np.full((1, 3), -0.1), rtol=1e-6)


def test_duplicates_in_bags_features_and_devices_are_one_update(mesh):
    spec = TableSpec("item", 2, rowwise_adagrad(0.1), initializer=zeros())
    features = {
        "sum": FeatureSpec(spec),
        "one": FeatureSpec(spec),
        "mean": FeatureSpec(spec, "mean"),
        "sequence": FeatureSpec(spec, "none"),
    }

    def apply(params, state, dense, embeddings, *, train):
        sequence = embeddings["sequence"]
        total = embeddings["sum"] + embeddings["one"] + 4 * embeddings["mean"]
        total += jnp.sum(jnp.where(sequence.mask[..., None], sequence.values, 5), 1)
        return jnp.sum(total, 1) * dense[:, 0], state

    n = 16
    bags = Jagged(np.full(3 * n, 3), np.full(n, 3))
    dense = np.linspace(0.5, 1.5, n)[:, None]
    batch = Batch(
        np.zeros(n), dense, np.full((1, n), 3), ("one",),
        {"sum": bags, "mean": bags, "sequence": bags},
    )  # fmt: skip
    collection = EmbeddingCollection(features, mesh=mesh)
    network = Network(apply, {"unused": np.zeros(1)}, {})
    state, _ = train(collection, network, [batch], loss=logit_loss)
    total = dense.mean() * (3 + 1 + 4 + 3)
    got = collection.lookup_rows(state.tables, "item", np.array([3]))
    np.testing.assert_allclose(got["row_state"][0], [total**2], rtol=1e-5)
    np.testing.assert_allclose(got["rows"], np.full((1, 2), -0.1), rtol=1e-5)
    assert [int(s) for s in state.tables[0].shared] == [1]


# Against the reference: other meshes and hard sets of keys.


def tanh_network() -> Network:
    def apply(params, state, dense, embeddings, *, train):
        vectors = jnp.concatenate(list(embeddings.values()), 1)
        return jnp.tanh(vectors + dense) @ params["out"], state

    out = np.random.default_rng(5).normal(size=9).astype(np.float32)
    return Network(apply, {"out": out}, {})


def assert_equals_reference(mesh, keys, draw, *, steps=3, batch=22, **close):
    """Trains on bags of each placement; `draw(rng)` makes one feature's bags."""
    rng = np.random.default_rng(8)
    one = Batch(
        rng.integers(0, 2, batch),
        rng.normal(size=(batch, 1)) * np.ones((1, 9)),
        np.zeros((0, batch), np.int64),
        (),
        {p: draw(rng, batch) for p in PLACEMENTS},
    )
    batches = [one] * steps  # one size, one program
    features = one_of_each()
    network, tx = tanh_network(), optax.adam(0.01)
    keys = np.sort(keys)
    rows = first_rows(features, everywhere(keys))
    reference = DenseTraining(features, network, tx, everywhere(keys), rows)
    expected = [reference.step(b) for b in batches]
    collection = EmbeddingCollection(features, mesh=mesh, initial_rows=4)
    state, losses = train(collection, network, batches, tx)
    close = CLOSE | close
    np.testing.assert_allclose(losses, expected, **close)
    for placement in PLACEMENTS:
        got = collection.lookup_rows(state.tables, placement, keys)
        wanted = np.asarray(reference.tables[placement])[got["found"]]
        np.testing.assert_allclose(got["rows"][got["found"]], wanted, **close)
        assert got["found"].sum() > 3
    return collection


@pytest.mark.parametrize("mesh_shape", ["3x1", "6x1", "3x2"])
def test_any_number_of_devices(mesh_shape):
    keys = wide_keys(40)
    assert_equals_reference(
        make_mesh(mesh_shape),
        keys,
        lambda rng, n: random_bags(rng, n, keys, weighted=True),
    )


def test_one_hot_key():
    """90 % of the ids are one key: correct, and not exchanged more than once."""
    keys = wide_keys(30)

    def draw(rng, n):
        values = rng.choice(keys, 4 * n)
        values[rng.random(4 * n) < 0.9] = keys[17]
        return Jagged(values, np.full(n, 4))

    mesh = make_mesh("4x2")
    assert_equals_reference(mesh, keys, draw)
    collection = EmbeddingCollection(one_of_each(), mesh=mesh)
    hot = Jagged(np.full(4000, 7), np.full(1000, 4))
    plan = collection.plan(dict.fromkeys(PLACEMENTS, hot), 1000, train=True)
    assert [group.send for group in plan.groups] == [16, 0]


@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [("1x1", "low bits"), ("2x4", "one owner")]
)
def test_keys_whose_hashes_collide(mesh_shape, shape):
    """One place in the index, or one device for all: slow perhaps, never lossy."""
    collection = EmbeddingCollection(one_of_each(), mesh=make_mesh(mesh_shape))
    salt = int(collection.planner.tables[0][0].table.salt)
    hashes = [i << 32 | 9 if shape == "low bits" else i * 77777 + 9 for i in range(200)]
    keys = np.array([(unmix64(h) - salt) % 2**64 for h in hashes], np.uint64)
    if shape == "one owner":
        plan = collection.plan(everywhere(keys), len(keys), train=True)
        assert plan.slots_used[0][0] >= 200
    assert_equals_reference(
        make_mesh(mesh_shape),
        keys,
        lambda rng, n: Jagged(rng.choice(keys, 8 * n), np.full(n, 8)),
    )


@pytest.mark.parametrize("mesh_shape", ["1x1", "4x2"])
def test_free_slots_do_not_leak(mesh_shape):
    """Whatever lies in slots without a row, and in padding, is never read."""
    keys = wide_keys(40)
    rng = np.random.default_rng(3)
    features = one_of_each(tx=optax.adam(0.1))
    batches = [
        Batch(
            np.ones(n), np.ones((n, 9)), np.zeros((0, n), np.int64), (),
            {p: random_bags(rng, n, keys, weighted=True) for p in PLACEMENTS},
        )
        for n in (19, 3)
    ]  # fmt: skip
    network, tx = tanh_network(), optax.adam(0.01)
    runs = []
    for poison in (0.0, np.nan):
        mesh = make_mesh(mesh_shape)
        collection = EmbeddingCollection(features, mesh=mesh, initial_rows=256)
        state = init_state(network, tx, collection)
        tables = jax.tree.map(
            lambda x: x + poison if x.ndim else x,  # noqa: B023
            state.tables,
        )
        state = state.replace(tables=tables)
        step = make_train_step(network, tx, collection)
        for batch in batches:
            state, info = step(state, prepare(collection, batch, train=True))
            assert np.isfinite(info["loss"])
        runs.append(
            jax.tree.map(
                np.asarray,
                [
                    state.params,
                    *(collection.lookup_rows(state.tables, p, collection.keys(p))
                      for p in PLACEMENTS),
                ],
            )
        )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, *runs)
    assert np.isfinite(runs[0][0]["out"]).all()


def test_full_slabs_have_no_slot_to_spare():
    """The padding of an update is written nowhere, not even into the last slot."""
    keys = wide_keys(48)
    few = [3, 40]
    batches = [
        Batch(np.ones(n), np.ones((n, 9)), np.stack([k] * 3), PLACEMENTS)
        for n, k in ((48, keys), (2, keys[few]))
    ]
    learnt = {}
    for slots in (2 * len(keys), 1024):  # two tables share a slab
        collection = EmbeddingCollection(
            one_of_each(), mesh=make_mesh("1x1"), initial_rows=slots
        )
        state, _ = train(collection, tanh_network(), batches)
        assert state.tables[0].rows.shape == (slots, 3)
        learnt[slots] = read_all(collection, state.tables, keys)
    jax.tree.map(np.testing.assert_array_equal, *learnt.values())
    first = first_rows(one_of_each(), everywhere(keys))
    for placement in PLACEMENTS:
        assert (learnt[1024][placement] != first[placement]).any(1).all()


@pytest.mark.parametrize("mesh_shape", ["1x1", "2x1"])
def test_full_arrays_have_no_zeros_to_spare(mesh_shape):
    """An id without a row reads zeros also where no place of the arrays is padding."""
    spec = TableSpec("item", 3)
    features = {"mean": FeatureSpec(spec, "mean"), "none": FeatureSpec(spec, "none")}
    collection = EmbeddingCollection(features, mesh=make_mesh(mesh_shape))
    salt = collection.planner.tables[0][0].table.salt
    keys = wide_keys(400)
    owners = owners_of(keys + salt, -1, DeviceSpan.whole(2))
    if mesh_shape == "1x1":
        keys = keys[:64]
    else:  # one requester asks each of two owners for 16
        keys = np.concatenate([keys[owners == owner][:16] for owner in range(2)])
    # the second example is the second device's: it has none
    values = Jagged(keys, np.array([len(keys), 0]))
    state = plan_and_fill(collection, dict.fromkeys(features, values), 2)
    absent = np.array([5], np.uint64)
    values = Jagged(np.concatenate([keys, absent]), np.array([len(keys) + 1, 0]))
    plan = collection.plan(dict.fromkeys(features, values), 2, train=False)
    (group,) = plan.groups
    assert group.received(collection.devices) == len(keys)
    got = run_plan(collection, state, plan, 2)
    rows = collection.lookup_rows(state, "item", keys)["rows"]
    n = len(keys)
    np.testing.assert_array_equal(got["none"].values[0, :n], rows)
    assert not got["none"].values[0, n:].any()
    assert not got["none"].values[1].any()
    np.testing.assert_array_equal(got["none"].mask.sum(1), [n + 1, 0])
    np.testing.assert_allclose(
        got["mean"][0], rows.sum(0) / (n + 1), rtol=1e-4, atol=1e-6
    )
    assert not got["mean"][1].any()


def test_low_precision_rows_train():
    spec = TableSpec("item", 4, optax.adagrad(0.1), dtype=jnp.bfloat16)

    def apply(params, state, dense, embeddings, *, train):
        assert embeddings["x"].dtype == jnp.bfloat16
        return jnp.sum(embeddings["x"].astype(jnp.float32), 1), state

    network = Network(apply, {"unused": np.zeros(1)}, {})
    bags = Jagged(np.array([1, 2, 2, 3]), np.array([2, 2]), np.array([1, 2, 3, 4]))
    batch = Batch([1, 0], np.zeros((2, 0)), np.zeros((0, 2), int), (), {"x": bags})
    collection = EmbeddingCollection(
        {"x": FeatureSpec(spec, "mean")}, mesh=make_mesh("2x1")
    )
    state, losses = train(collection, network, [batch] * 8)
    assert state.tables[0].rows.dtype == jnp.bfloat16
    assert losses[-1] < losses[0] - 0.1

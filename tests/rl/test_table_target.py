"""Targets of tables equal an oracle that copies, or averages, the whole table."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax import rl, train
from shardjax.data import Batch
from shardjax.embed import (
    TTL,
    EmbeddingCollection,
    FeatureSpec,
    Jagged,
    MinCount,
    RowOptimizerError,
    Storage,
    TableSpec,
    sequence_masks,
    split_features,
    uniform,
)
from shardjax.mesh import make_mesh
from shardjax.network import Network
from shardjax.state import init_state

KEYS, BATCH, DIM = 60, 24, 3


def network() -> Network:
    def apply(params, state, dense, embeddings, *, train):
        hidden = embeddings["user"] * params["w"] + embeddings["bag"] + dense
        return hidden.sum(1), state

    return Network(apply, {"w": np.ones((1, DIM), np.float32)}, {})


def batches(n, seed=0, keys=KEYS):
    """Batches that drift over the keys, so that rows come, rest and leave; key 7 in each."""
    rng = np.random.default_rng(seed)
    for step in range(n):
        low = step * keys // (2 * n)
        users = rng.integers(low, low + keys // 2, BATCH).astype(np.uint64)
        users[0] = 7
        lengths = rng.permutation(np.resize([2, 0, 1], BATCH))
        bag = Jagged(rng.integers(low, low + keys // 2, lengths.sum()), lengths)
        labels = rng.integers(0, 2, BATCH).astype(np.float32)
        dense = rng.normal(size=(BATCH, DIM)).astype(np.float32)
        yield Batch(labels, dense, users[None], ("user",), {"bag": bag})


class Run:
    """Training of two tables with a target each, and oracles beside it."""

    def __init__(self, tx, mesh="1x1", storage=None, **more):
        more = {"initializer": uniform(0.5)} | more
        user = TableSpec("user", DIM, tx, **more)
        item = TableSpec("item", DIM, tx, **more)
        self.features = {
            "user": FeatureSpec(user),
            "bag": FeatureSpec(item, combiner="mean"),
        }
        self.mesh = make_mesh(mesh)
        self.collection = EmbeddingCollection(
            self.features, mesh=self.mesh, storage=storage, initial_rows=8
        )
        self.state = init_state(network(), optax.sgd(0.1), self.collection)
        self.step = train.make_train_step(network(), optax.sgd(0.1), self.collection)
        change = partial(self.collection.map_row_state, change=rl.copy_targets)
        self.copy = jax.jit(change, donate_argnums=0)

    def rows(self, view=None) -> dict[tuple[str, int], np.ndarray]:
        """The rows of all keys that have one, or what a view shows of them."""
        out = {}
        for table in ("user", "item"):
            keys = np.arange(KEYS + 5)  # always as many: programs depend on it
            read = self.collection.lookup_rows(self.state.tables, table, keys, view)
            here = np.flatnonzero(read["found"])
            assert set(here) == set(self.collection.keys(table).tolist())
            out |= {(table, int(k)): read["rows"][k] for k in here}
        return out

    def copy_due(self):
        """What the step does at its start."""
        tables = self.copy(self.state.tables)
        self.state = self.state.replace(tables=tables)

    def take(self, batch):
        self.state, _ = self.step(self.state, batch)

    def prepared(self, made):
        for batch in made:
            yield train.prepare(self.collection, batch, train=True)


class FullCopy:
    """The oracle: a copy of every row, made every so many steps."""

    def __init__(self, every):
        self.every, self.steps, self.copy = every, 0, {}

    def before_step(self, rows):
        if self.steps % self.every == 0:
            self.copy = rows
        self.steps += 1

    def expected(self, rows, first):
        """Rows born since have their first value; those that left are forgotten."""
        self.copy = {k: x for k, x in self.copy.items() if k in rows}
        return {k: self.copy.get(k, first[k]) for k in rows}


def first_values(**more):
    """The first value of every row, of a collection that has trained nothing."""
    run = Run(optax.sgd(0.1), **more)
    every = np.arange(KEYS + 5, dtype=np.uint64)
    bag = Jagged(every, np.ones(len(every), np.int32))
    labels, dense = np.zeros(len(every)), np.zeros((len(every), DIM))
    batch = Batch(labels, dense, every[None], ("user",), {"bag": bag})
    [batch] = run.prepared([batch])
    tables = run.collection.apply_fills(run.state.tables, batch.plan)
    run.state = run.state.replace(tables=tables)
    return run.rows()


@pytest.fixture(scope="module")
def first():
    return first_values()


def same(found, expected):
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(found[key], row, str(key))


def check(run, oracle, first, steps, seed=0, start=0):
    """Steps with the target compared before each, all rows of it."""
    moved = 0
    for batch in run.prepared(list(batches(start + steps, seed))[start:]):
        run.copy_due()
        rows = run.rows()
        oracle.before_step(rows)
        expected = oracle.expected(rows, first)
        same(run.rows(rl.read_target), expected)
        moved += sum((rows[k] != expected[k]).any() for k in rows)
        run.take(batch)
    return moved


CASES = {
    "every step": (1, "1x1", {}),
    "4 steps on 8 devices": (4, "8x1", {}),
    "never again": (1000, "2x4", {}),
    "rows that leave": (5, "1x1", {"evict": TTL(steps=2)}),
    "rows that leave 8 devices": (3, "8x1", {"evict": TTL(steps=2)}),
    "rows that wait": (3, "1x1", {"admit": MinCount(3)}),
    "replicated": (4, "4x2", {"placement": "data_parallel", "capacity": 1000}),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "write") for name in CASES]
    + [(name, "copy") for name in ("every step", "4 steps on 8 devices", "replicated")],
)
def test_the_target_is_a_copy_of_the_whole_table(name, mode, first):
    every, mesh, more = CASES[name]
    run = Run(rl.keep_target(optax.adam(0.1), rl.HardCopy(every), mode), mesh, **more)
    moved = check(run, FullCopy(every), first, 12)
    assert (moved > 0) == (every > 1)


@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
def test_targets_move_with_their_rows_to_ram_and_disk(mesh, first, tmp_path):
    storage = Storage(device_rows=80, host_bytes="6KB", disk=tmp_path)
    run = Run(rl.keep_target(optax.adam(0.1), rl.HardCopy(4)), mesh, storage)
    moved = check(run, FullCopy(4), first, 14)
    stats = run.collection.stats()["group0"]
    assert moved > 0
    assert stats["disk_rows"] > 0
    assert stats["host_rows"] > 0
    run.collection.close()


def test_a_target_of_an_average_equals_one_that_follows_all_rows(first):
    tau = 0.05
    run = Run(rl.keep_target(optax.adam(0.1), rl.Polyak(tau)), "4x2")
    follows = {}
    for batch in run.prepared(batches(16)):
        found = run.rows(rl.read_target)
        for key, row in found.items():
            expected = follows.setdefault(key, first[key].astype(np.float64))
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)
        run.take(batch)
        for key, row in run.rows().items():
            before = follows.setdefault(key, first[key].astype(np.float64))
            follows[key] = before + tau * (row - before)
    rows = run.rows()
    assert any((rows[k] != follows[k]).any() for k in rows)


def test_an_average_of_bfloat16_rows_gets_there():
    tx = rl.keep_target(optax.sgd(0.0), rl.Polyak(0.005))
    rows = jnp.full((1, 2), 0.5, jnp.bfloat16)
    state = tx.init(rows)
    rows, grads = jnp.ones_like(rows), jnp.zeros_like(rows)
    update = jax.jit(lambda state: tx.update(grads, state, rows)[1])
    for _ in range(2000):
        state = update(state)
    assert state.target.dtype == jnp.float32
    np.testing.assert_allclose(state.target, 1, atol=1e-3)


def test_rows_that_are_nan_do_not_outlive_the_next_copy():
    tx = rl.keep_target(optax.sgd(1.0), rl.HardCopy(2))
    rows = jnp.array([[jnp.nan], [1.0]])
    state = tx.init(rows)
    grads = jnp.zeros_like(rows)
    for _ in range(2):
        _, state = tx.update(grads, state, rows)
    healed = jnp.ones_like(rows)
    np.testing.assert_array_equal(rl.read_target(tx, healed, state), healed)


@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
def test_a_step_reads_the_target_of_all_its_examples(mesh):
    """What the exchange brings of the targets equals reading them one by one."""
    run = Run(rl.keep_target(optax.adam(0.1), rl.HardCopy(3)), mesh)
    collection, axes = run.collection, run.collection.axes
    spec, by_device = collection.state_spec(), jax.P(axes)

    def local(tables, packed, layout):
        arrays = layout.unpack(packed[0])
        rows = collection.gather_rows(tables, arrays, rl.read_target)
        blocks = collection.embed(rows, arrays, layout)
        return split_features(layout, blocks, sequence_masks(layout, arrays))["user"]

    made = list(batches(5))
    for batch, ready in zip(made, run.prepared(made), strict=True):
        tables = collection.apply_fills(run.state.tables, ready.plan)
        run.state = run.state.replace(tables=tables)
        found = jax.jit(
            jax.shard_map(
                partial(local, layout=ready.layout),
                mesh=run.mesh,
                in_specs=(spec, by_device),
                out_specs=by_device,
                check_vma=False,
            )
        )(tables, ready.packed)
        expected = collection.lookup_rows(
            tables, "user", batch.fixed[0], rl.read_target
        )
        np.testing.assert_array_equal(found[:BATCH], expected["rows"])
        # the step would bring the same rows again
        run.state, _ = run.step.jitted(run.state, ready.packed, layout=ready.layout)


def test_keys_without_a_row_read_zeros_of_the_target():
    run = Run(rl.keep_target(optax.adam(0.1), rl.HardCopy(3)))
    read = run.collection.lookup_rows(
        run.state.tables, "user", np.array([3]), rl.read_target
    )
    assert read["rows"].tolist() == [[0.0] * DIM]


def test_wrong_targets_are_refused():
    with pytest.raises(TypeError, match="the rule of a target must be HardCopy"):
        rl.keep_target(optax.adam(0.1), 3)
    with pytest.raises(ValueError, match="one of write, copy for .*, got 'shadow'"):
        rl.keep_target(optax.adam(0.1), rl.HardCopy(3), "shadow")
    with pytest.raises(ValueError, match="one of write for .*, got 'copy'"):
        rl.keep_target(optax.adam(0.1), rl.Polyak(0.1), "copy")


def test_a_table_without_a_target_is_named():
    run = Run(optax.adam(0.1))
    with pytest.raises(
        ValueError, match="optimizer of table 'user' must keep a target"
    ):
        rl.check_targets(run.collection.groups, rl.HardCopy(3))
    with pytest.raises(ValueError, match="must keep a target"):
        run.collection.lookup_rows(
            run.state.tables, "user", np.array([3]), rl.read_target
        )


def test_tables_in_ram_are_not_copied_whole():
    tx = rl.keep_target(optax.adam(0.1), rl.HardCopy(3), "copy")
    run = Run(tx, storage=Storage(device_rows=80))
    with pytest.raises(ValueError, match="of table 'user' must not have mode 'copy'"):
        rl.check_targets(run.collection.groups, rl.HardCopy(3))
    rl.check_targets(Run(tx).collection.groups, rl.HardCopy(3))


def test_optimizers_that_do_not_work_row_by_row_are_still_refused():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    tx = rl.keep_target(clipped, rl.HardCopy(3))
    with pytest.raises(RowOptimizerError):
        Run(tx)

"""What XLA makes of a step: its collectives, its memory, and how many there are."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from shardjax.data.batch import Batch
from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Jagged,
    Sequence,
    TableSpec,
    device_table,
    init_device_table,
    rowwise_adagrad,
    split_keys,
)
from shardjax.embed.layout import rung
from shardjax.mesh import AXES, make_mesh
from shardjax.network import Network
from shardjax.state import init_state
from shardjax.train import make_eval_step, make_train_step, prepare
from tests.helpers import collectives, table_sized

pytestmark = pytest.mark.usefixtures("fused")

SLOTS = 7919  # a size that no other array has
BATCH = 16


def make_features(bags: int) -> dict[str, FeatureSpec]:
    """Two slabs that are exchanged and one that is not."""
    adam = optax.adam(0.1)
    spread = TableSpec("spread", 6, adam)
    whole = TableSpec("whole", 6, adam, placement="table_wise")
    copied = TableSpec("copied", 6, adam, placement="data_parallel")
    other = TableSpec("other", 10, rowwise_adagrad(0.1))
    features = {f"bag{i}": FeatureSpec(spread, "mean") for i in range(bags)}
    return features | {
        "whole": FeatureSpec(whole),
        "copied": FeatureSpec(copied),
        "sequence": FeatureSpec(other, "none"),
    }


def make_batch(bags: int) -> Batch:
    jagged = Jagged(np.arange(3 * BATCH), np.full(BATCH, 3), np.ones(3 * BATCH))
    sequence = Jagged(np.arange(3 * BATCH), np.full(BATCH, 3))
    return Batch(
        np.zeros(BATCH),
        np.zeros((BATCH, 2)),
        np.tile(np.arange(BATCH), (2, 1)),
        ("whole", "copied"),
        {f"bag{i}": jagged for i in range(bags)} | {"sequence": sequence},
    )


def make_network() -> Network:
    def apply(params, state, dense, embeddings, *, train):
        vectors = [
            jnp.sum(v.values, 1) if isinstance(v, Sequence) else v
            for v in embeddings.values()
        ]
        hidden = jnp.tanh(jnp.concatenate([dense @ params["in"], *vectors], 1))
        return jnp.sum(hidden, 1) * params["out"], state

    return Network(apply, {"in": np.ones((2, 3), np.float32), "out": np.ones(())}, {})


def compile_step(mesh, bags: int, train: bool = True):
    """The compiled step, and the state it would take."""
    collection = EmbeddingCollection(make_features(bags), mesh=mesh, initial_rows=SLOTS)
    network, tx = make_network(), optax.adam(0.1)
    state = init_state(network, tx, collection)
    batch = prepare(collection, make_batch(bags), train=train)
    if train:
        step = make_train_step(network, tx, collection)
        state = state.replace(tables=collection.apply_fills(state.tables, batch.plan))
        arguments = (state, batch.packed)
    else:
        step = make_eval_step(network, collection)
        arguments = (state.params, {}, state.tables, {}, batch.packed)
    lowered = step.jitted.lower(*arguments, layout=batch.layout)
    return lowered.compile(), state, collection


def test_a_step_touches_its_rows_alone(mesh):
    compiled, state, collection = compile_step(mesh, bags=2)
    assert table_sized(compiled, SLOTS) == []
    leaves = jax.tree.leaves([(s.rows, s.row_state) for s in state.tables])
    assert len(leaves) == 8
    text = compiled.as_text()
    assert len(re.findall(rf"= f32\[{SLOTS}\b\S* scatter\(", text)) == len(leaves)

    # every slab is updated in place
    slab_bytes = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= slab_bytes
    assert memory.temp_size_in_bytes < slab_bytes / 10

    # rows to their requesters and gradients back, for the two slabs that are spread
    found = collectives(compiled)
    assert found["all-to-all"] == (0 if mesh.size == 1 else 4)
    assert found["all-reduce"] <= 3
    assert found.keys() <= {"all-to-all", "all-reduce"}


def test_the_search_for_table_sized_operations_finds_them():
    slab = jnp.zeros((SLOTS, 6))

    def run(slab, slots):
        rows = slab[slots]
        return slab.at[slots].set(rows + 1), (slab * 2).at[slots].add(rows)

    compiled = jax.jit(run, donate_argnums=0).lower(slab, np.arange(9)).compile()
    assert table_sized(compiled, SLOTS) != []


def test_collectives_do_not_grow_with_features():
    mesh = make_mesh("4x2")
    few, many = (collectives(compile_step(mesh, bags)[0]) for bags in (1, 7))
    assert few == many


@pytest.mark.parametrize("mesh_shape", ["1x1", "8x1"])
def test_evaluation_reads_its_rows_alone(mesh_shape):
    compiled, _, _ = compile_step(make_mesh(mesh_shape), bags=2, train=False)
    assert table_sized(compiled, SLOTS) == []
    assert collectives(compiled) == ({} if mesh_shape == "1x1" else {"all-to-all": 2})


def test_the_state_is_donated():
    mesh = make_mesh("2x1")
    collection = EmbeddingCollection(make_features(1), mesh=mesh)
    network, tx = make_network(), optax.adam(0.1)
    state = init_state(network, tx, collection)
    step = make_train_step(network, tx, collection)
    params = jax.tree.map(np.copy, network.params)
    after, _ = step(state, prepare(collection, make_batch(1), train=True))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    jax.tree.map(np.testing.assert_array_equal, network.params, params)


def varied_batches(count: int):
    """Jagged batches of one size, of lengths and keys that differ a lot."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        longest = int(rng.integers(1, 9))
        lengths = rng.integers(0, longest + 1, BATCH)
        keys = rng.zipf(1.3, int(lengths.sum())) % int(rng.integers(1, 500))
        bags = Jagged(keys, lengths)
        values = {"bag0": bags, "sequence": bags}
        values |= dict.fromkeys(("whole", "copied"), rng.integers(0, 9, BATCH))
        yield values


@pytest.mark.parametrize("mesh_shape", ["1x1", "8x1"])
def test_varied_batches_share_few_layouts(mesh_shape):
    """Sizes only ever climb the ladder: one program per step of it at most."""
    mesh = make_mesh(mesh_shape)
    collection = EmbeddingCollection(make_features(1), mesh=mesh)
    plans = [collection.plan(v, BATCH, train=True) for v in varied_batches(100)]
    layouts = [(plan.examples, plan.groups) for plan in plans]
    assert len(set(layouts)) <= 8

    def sizes(groups):
        lengths = [s.length for g in groups for s in g.sequences]
        return [size for g in groups for size in (g.rows, g.send, g.values)] + lengths

    climbed = 0
    for first, last in zip(sizes(layouts[0][1]), sizes(layouts[-1][1]), strict=True):
        assert first <= last
        climbed += len({rung(n, 1) for n in range(first, last + 1)}) - 1
    assert len(set(layouts)) <= 1 + climbed
    assert layouts[60:] == [layouts[60]] * 40  # and soon they are settled


def test_equal_layouts_run_one_program():
    mesh = make_mesh("4x2")
    collection = EmbeddingCollection(make_features(1), mesh=mesh)
    network, tx = make_network(), optax.adam(0.1)
    state = init_state(network, tx, collection)
    step = make_train_step(network, tx, collection)
    layouts = set()
    for values in varied_batches(12):
        fixed = np.stack([values.pop("whole"), values.pop("copied")])
        labels, dense = np.zeros(BATCH), np.zeros((BATCH, 2))
        batch = Batch(labels, dense, fixed, ("whole", "copied"), values)
        prepared = prepare(collection, batch, train=True)
        layouts.add(prepared.layout)
        state, _ = step(state, prepared)
    assert step.jitted._cache_size() == len(layouts) <= 4


@pytest.mark.parametrize(
    ("shape", "name"),
    [(None, "find_or_insert"), (None, "erase"), ("8x1", "find_or_insert")],
)
def test_a_device_table_is_changed_where_it_lies(shape, name):
    """A program needs less memory than the smallest array of the table it changes."""
    mesh, function = shape and make_mesh(shape), getattr(device_table, name)
    table = jax.eval_shape(partial(init_device_table, 10**7, mesh=mesh))
    if mesh is not None:
        function = jax.shard_map(
            partial(function, axis=AXES),
            mesh=mesh,
            in_specs=P(AXES),
            out_specs=(P(AXES), P(AXES), P(AXES), P()),
        )
    keys = split_keys(np.arange(1024))  # long enough for pieces
    step = jax.jit(function, donate_argnums=0)
    memory = step.lower(table, keys).compile().memory_analysis()
    arrays = (table.hi, table.lo, table.tags, table.passed)
    sizes = [x.size * x.dtype.itemsize // table.count.size for x in arrays]
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes)

"""What XLA makes of a step with a target: nothing as large as a table, but copies when due."""

import re

import numpy as np
import optax
import pytest

from shardjax import rl, train
from shardjax.data import Batch
from shardjax.embed import EmbeddingCollection, FeatureSpec, TableSpec
from shardjax.mesh import make_mesh
from shardjax.network import Network
from shardjax.state import init_state
from tests.helpers import table_sized

pytestmark = pytest.mark.usefixtures("fused")

SLOTS, DIM = 7919, 6  # a size that no other array has


def compile_step(rule, mode="write", mesh="1x1"):
    """The compiled step of a Q-network, and the slab of its table."""
    tx = rl.keep_target(optax.adam(0.1), rule, mode)
    table = TableSpec("item", DIM, tx)
    names = ("state", "action", "following", "next_action")
    collection = EmbeddingCollection(
        {name: FeatureSpec(table) for name in names},
        mesh=make_mesh(mesh),
        initial_rows=SLOTS,
    )

    def apply(params, state, dense, embeddings, *, train):
        state_tm1, a_tm1, state_t, a_t = (embeddings[n] * params["w"] for n in names)
        q_t = (state_t * a_t).sum(1, keepdims=True)
        return rl.QValues((state_tm1 * a_tm1).sum(1), q_t), state

    network, tx = (
        Network(apply, {"w": np.ones((1, DIM), np.float32)}, {}),
        optax.sgd(0.1),
    )
    objective = rl.QLearning(rule)
    state = init_state(network, tx, collection, target=rule)
    step = train.make_train_step(network, tx, collection, objective=objective)
    keys = np.arange(64, dtype=np.uint64).reshape(4, 16)
    batch = Batch(np.ones(16), np.ones((16, 1)), keys, names)
    batch = train.prepare(collection, batch, train=True)
    state = state.replace(tables=collection.apply_fills(state.tables, batch.plan))
    lowered = step.jitted.lower(state, batch.packed, layout=batch.layout)
    [slab] = state.tables
    return lowered.compile(), slab


@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
@pytest.mark.parametrize("rule", [rl.HardCopy(10), rl.Polyak(0.1)], ids=str)
def test_targets_that_are_written_need_nothing_as_large_as_a_table(rule, mesh):
    compiled, slab = compile_step(rule, mesh=mesh)
    assert table_sized(compiled, SLOTS) == []
    leaves = [slab.rows, *slab.row_state]
    slab_bytes = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= slab_bytes
    assert memory.temp_size_in_bytes < slab_bytes / 10
    # a row is as large as README says: rows, two moments, the target and its mark
    assert slab_bytes == SLOTS * 4 * (4 * DIM + 1)


def test_a_whole_copy_is_behind_a_condition_and_in_place():
    compiled, slab = compile_step(rl.HardCopy(10), "copy")
    large = table_sized(compiled, SLOTS)
    assert sum(" conditional(" in line for line in large) == 1
    assert sum(" copy(" in line for line in large) == 1
    text = compiled.as_text()
    always = text[text.index("\nENTRY ") :]
    assert not re.search(rf"\[{SLOTS},{DIM}\]\S* copy\(", always)
    leaves = [slab.rows, *slab.row_state]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in leaves)
    assert memory.temp_size_in_bytes <= 1.1 * slab.rows.nbytes

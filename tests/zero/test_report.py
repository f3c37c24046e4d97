"""What a plan predicts is what arrays and compiled programs have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardjax as sj
from shardjax import profiling, zero
from shardjax.precision import with_master
from tests.zero.small import RULES, make_loss, plan_small, small_batch, small_params

pytestmark = pytest.mark.usefixtures("fused")

WIDE = {
    "embedding": np.zeros((40, 16), np.float32),
    "blocks": {
        "w1": np.zeros((4, 16, 256), np.float32),
        "w2": np.zeros((4, 256, 16), np.float32),
        "scale": np.zeros((4, 16), np.float32),
    },
    "bias": np.zeros(41, np.float32),
    "count": np.int32(3),
}


def compiled(plan, tx, microbatches=1, remat="none"):
    step = zero.make_step(make_loss(remat), tx, plan, microbatches=microbatches)
    return step.jitted.lower(zero.abstract_state(plan), small_batch(0)).compile()


def sent(plan, tx, *args):
    found = profiling.collectives(compiled(plan, tx, *args), devices=plan.mesh)
    return profiling.wire_bytes(found)


@pytest.mark.parametrize(
    ("stage", "microbatches", "ratio"),
    [
        (0, 1, 1.0),
        (0, 4, 1.0),
        (1, 1, 1.0),
        (1, 4, 1.0),
        (2, 1, 1.0),
        (2, 4, 2.5),
        (3, 1, 1.5),
        (3, 2, 3.0),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_paper(stage, microbatches, ratio):
    tx = optax.adamw(1e-2)
    plan = plan_small("8x1", stage, tx, params=WIDE)
    found = sent(plan, tx, microbatches)
    assert not found.unknown
    predicted = zero.predict_wire_bytes(plan, microbatches)
    assert found.total == pytest.approx(predicted.total, rel=0.01)
    # of what lies outside of the layers, 2 %, stage 3 gathers once
    data_parallel = zero.predict_wire_bytes(plan_small("8x1", 0, tx, params=WIDE))
    assert found.total / data_parallel.total == pytest.approx(ratio, rel=0.02)
    if stage:
        assert found.by_kind["all-reduce"] < 0.01 * found.total


@pytest.mark.parametrize("stage", zero.STAGES)
def test_no_gather_over_the_axis_of_tensor_parallelism(stage):
    tx = optax.adamw(1e-2)
    plan = plan_small("4x2", stage, tx, RULES, params=WIDE)
    found = profiling.collectives(compiled(plan, tx, 2), devices=plan.mesh)
    predicted = zero.predict_wire_bytes(plan, 2)
    over_data = sum(c.bytes_sent * (c.times or 0) for c in found if c.axes == ("data",))
    assert over_data == pytest.approx(predicted.total, rel=0.01)
    gathers = [c for c in found if c.axes != ("data",) and c.kind != "all-reduce"]
    # the targets of a lookup, never a parameter
    assert sum(c.bytes_sent * (c.times or 0) for c in gathers) < 256


def test_the_number_of_collectives_does_not_grow_with_microbatches():
    tx = optax.adamw(1e-2)
    plan = plan_small("8x1", 1, tx)

    def count(microbatches):
        found = profiling.collectives(
            compiled(plan, tx, microbatches), devices=plan.mesh
        )
        return sum(c.times for c in found)

    assert count(1) == count(4)


def test_recomputing_by_groups_gathers_three_times():
    tx = optax.adamw(1e-2)
    plan = plan_small("8x1", 3, tx, params=WIDE)
    predicted = zero.predict_wire_bytes(plan, gathers=3).total
    assert sent(plan, tx, 1, "sqrt:2").total == pytest.approx(predicted, rel=0.01)


def local_bytes(tree) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("stage", zero.STAGES)
@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
def test_estimates_are_what_arrays_take(stage, mesh):
    tx = optax.adamw(1e-2)
    plan = plan_small(mesh, stage, tx, RULES if mesh == "4x2" else ())
    state = zero.init_state(small_params(), tx, plan)
    estimate = zero.estimate_memory(plan)
    assert local_bytes(state.params) == estimate.params
    assert local_bytes(state.opt_state) == estimate.opt_state


@pytest.mark.parametrize(
    ("stage", "per_parameter"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)
def test_bytes_per_device_fall_as_the_paper_says(stage, per_parameter):
    """Mixed precision with Adam: 2 bytes of parameter, 2 of gradient, 12 of state."""
    tx = with_master(optax.adam(1e-3))
    params = {"w": jnp.zeros((4, 64, 256), jnp.bfloat16)}
    mesh = sj.make_mesh("8x1")
    plan = zero.plan_zero(params, tx, mesh, stage, blocks=["w"], min_bytes=0)
    state = zero.init_state(params, tx, plan)
    grads = zero.estimate_memory(plan).grads
    total = local_bytes((state.params, state.opt_state)) + grads
    assert total == pytest.approx(per_parameter * params["w"].size, rel=0.02)


def test_gradients_are_accumulated_whole_at_stage_1_and_in_parts_at_stage_2():
    """By the temporaries of two programs that differ in nothing else."""
    tx = optax.sgd(1e-2)
    params = {f"w{i}": np.zeros((128, 128), np.float32) for i in range(12)}

    def loss(params, batch):
        for w in params.values():
            batch = jnp.tanh(batch @ w)
        return jnp.sum(batch), jnp.float32(1)

    def temporaries(stage):
        plan = zero.plan_zero(params, tx, sj.make_mesh("8x1"), stage, min_bytes=0)
        step = zero.make_step(loss, tx, plan, microbatches=4)
        batch = jax.ShapeDtypeStruct((32, 128), jnp.float32)
        program = step.jitted.lower(zero.abstract_state(plan), batch).compile()
        return profiling.memory(program).temporaries, zero.estimate_memory(plan).grads

    (first, whole), (second, parts) = temporaries(1), temporaries(2)
    assert (whole, parts) == (12 * 128 * 128 * 4, 12 * 128 * 128 * 4 // 8)
    assert first - second > 0.5 * (whole - parts)


def test_what_microbatches_cost_does_not_grow_with_their_number():
    tx = optax.sgd(1e-2)
    params = {f"w{i}": np.zeros((64, 64), np.float32) for i in range(8)}
    plan = zero.plan_zero(params, tx, sj.make_mesh("8x1"), 1, min_bytes=0)

    def loss(params, batch):
        for w in params.values():
            batch = jnp.tanh(batch @ w)
        return jnp.sum(batch), jnp.float32(1)

    def temporaries(examples, microbatches):
        step = zero.make_step(loss, tx, plan, microbatches=microbatches)
        batch = jax.ShapeDtypeStruct((examples, 64), jnp.float32)
        program = step.jitted.lower(zero.abstract_state(plan), batch).compile()
        return profiling.memory(program).temporaries

    one, gradients = temporaries(4096, 1), 8 * 64 * 64 * 4
    assert zero.estimate_memory(plan).added == 0
    estimate = zero.estimate_memory(plan, microbatches=8)
    assert estimate.added == estimate.grads == gradients
    assert estimate.total - zero.estimate_memory(plan).total == gradients
    assert "of a microbatch" in zero.explain(plan, microbatches=8)
    # the sum, and where the compiler of CPUs builds the next one
    assert temporaries(8 * 4096, 8) < one + 2.1 * gradients
    assert temporaries(16 * 4096, 16) == temporaries(8 * 4096, 8)
    assert temporaries(8 * 4096, 1) > 4 * one  # or there would be nothing to bound


def test_the_table_tells_where_everything_lies():
    text = zero.explain(plan_small("4x2", 3, optax.adam(1e-3), RULES))
    assert "ZeRO stage 3 over data on data=4, model=2" in text
    assert "blocks/w1" in text
    assert "[-, data, model]" in text
    assert "whole: int32 is no float, not trained" in text
    assert "kept whole: 1.08% of 15,204 bytes of parameters" in text

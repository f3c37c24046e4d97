"""Click-through training with the network split by ZeRO, and in few bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax import plan_network
from shardjax.embed import EmbeddingCollection
from shardjax.mesh import make_mesh
from shardjax.metrics import LogLoss
from shardjax.precision import LossScaling, Precision
from shardjax.state import init_state
from shardjax.train import make_eval_step, make_train_step, prepare
from tests.test_train import FEATURES, assert_close, make_batch, plain_network, read

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01, eps=1e-3))
STEPS = 4


def run(mesh, stage, *, batches=None, precision="f32", loss=None, **more):
    """Trains; returns collection, state, plan and the infos of the steps."""
    network = plain_network()
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh(mesh))
    plan = plan_network(
        network, TX, collection, stage, min_bytes=0, precision=precision
    )
    state = init_state(network, TX, collection, zero=plan)
    if loss is not None:
        more["loss"] = loss
    step = make_train_step(network, TX, collection, zero=plan, **more)
    infos = []
    for batch in batches or [make_batch(i, 48) for i in range(STEPS)]:
        state, info = step(state, prepare(collection, batch, train=True))
        infos.append(jax.tree.map(float, info))
    return collection, state, plan, infos


@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_equal_one_device(mesh, stage):
    collection, state, plan, infos = run(mesh, stage, microbatch_size=2)
    expected_collection, expected, _, expected_infos = run("1x1", 0)
    assert_close(
        read(collection, state), read(expected_collection, expected), atol=1e-5
    )
    np.testing.assert_allclose(
        [i["loss"] for i in infos], [i["loss"] for i in expected_infos], rtol=1e-5
    )
    for leaf, x in zip(plan.leaves, jax.tree.leaves(state.params), strict=True):
        assert x.sharding.is_equivalent_to(
            jax.NamedSharding(plan.mesh, leaf.spec), x.ndim
        )
    mu = state.opt_state[1][0].mu["out"]
    assert mu.sharding.is_fully_replicated == (stage == 0)


def test_split_parameters_are_evaluated():
    collection, state, _, _ = run("8x1", 3)
    evaluate = make_eval_step(plain_network(), collection)
    from shardjax.state import compute_metrics, stack_metrics

    batch = prepare(collection, make_batch(9, 30), train=False)
    metrics = stack_metrics({"loss": LogLoss()}, collection.mesh)
    found, _ = evaluate(state, metrics, batch)
    other, other_state, _, _ = run("1x1", 0)
    batch = prepare(other, make_batch(9, 30), train=False)
    metrics = stack_metrics({"loss": LogLoss()}, other.mesh)
    wanted, _ = make_eval_step(plain_network(), other)(other_state, metrics, batch)
    assert compute_metrics(found)["loss"] == pytest.approx(
        compute_metrics(wanted)["loss"], rel=1e-5
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_bfloat16_stays_near_float32(stage):
    collection, state, _, _ = run("4x2", stage, precision="bf16")
    expected_collection, expected, _, _ = run("1x1", 0)
    assert state.params["in"].dtype == jnp.float32
    found, wanted = read(collection, state), read(expected_collection, expected)
    assert_close(found, wanted, rtol=0.05, atol=0.02)
    with pytest.raises(AssertionError):
        assert_close(found, wanted)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_moves_neither_parameters_nor_rows(stage):
    """One example of one device overflows in the second of three steps."""
    batches = [make_batch(i, 48, weights=False) for i in range(3)]

    def loss(logits, labels):
        # labels beyond 1 overflow: the gradient of the logits is infinite
        plain = optax.sigmoid_binary_cross_entropy(logits, jnp.minimum(labels, 1))
        return plain * jnp.where(labels > 1, jnp.inf, 1)

    scaled = Precision(jnp.float16, scaling=LossScaling(2.0**8, growth_interval=100))
    good, good_state, _, infos = run(
        "4x2", stage, batches=batches, precision=scaled, loss=loss
    )
    assert [i["skipped"] for i in infos] == [0, 0, 0]
    batches[1].labels[17] = 2
    bad, bad_state, _, infos = run(
        "4x2", stage, batches=batches, precision=scaled, loss=loss
    )
    assert [i["skipped"] for i in infos] == [0, 1, 1]
    assert [i["loss_scale"] for i in infos] == [256, 256, 128]
    assert int(bad_state.opt_state[1][0].count) == 2
    assert int(bad_state.step) == 3
    # what it has learnt is what a run without the second batch learns, whose rows, not
    # trained yet, are there all the same
    skipped, skipped_state, _, _ = run(
        "4x2", stage, batches=[batches[0], batches[2]], precision=scaled, loss=loss
    )
    assert_close(
        read(bad, bad_state)["params"],
        read(skipped, skipped_state)["params"],
        atol=1e-3,
    )
    with pytest.raises(AssertionError):
        assert_close(
            read(bad, bad_state)["params"], read(good, good_state)["params"], atol=1e-3
        )


def test_rows_are_as_before_a_skipped_step():
    def loss(logits, labels):
        return logits * labels * jnp.where(labels > 1, jnp.inf, 1)

    scaled = Precision(jnp.float16, scaling=LossScaling(2.0**8))
    first = make_batch(0, 48, weights=False)
    bad = make_batch(0, 48, weights=False)
    bad.labels[3] = 2
    one, one_state, _, _ = run("4x2", 2, batches=[first], precision=scaled, loss=loss)
    two, two_state, _, infos = run(
        "4x2", 2, batches=[first, bad, bad], precision=scaled, loss=loss
    )
    assert infos[-1]["skipped"] == 2
    jax.tree.map(
        np.testing.assert_array_equal, read(one, one_state), read(two, two_state)
    )


def test_state_and_step_must_have_the_same_plan():
    network, collection = (
        plain_network(),
        EmbeddingCollection(FEATURES, mesh=make_mesh("8x1")),
    )
    plan = plan_network(network, TX, collection, 3, min_bytes=0)
    state = init_state(network, TX, collection)
    step = make_train_step(network, TX, collection, zero=plan)
    with pytest.raises(ValueError, match="params/in of the state must lie as the plan"):
        step(state, prepare(collection, make_batch(0, 8), train=True))


def test_the_optimizer_must_be_that_of_the_plan():
    network = plain_network()
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("1x1"))
    plan = plan_network(network, TX, collection, 1)
    with pytest.raises(ValueError, match="the state of `tx` must have the structure"):
        make_train_step(network, optax.sgd(0.1), collection, zero=plan)


def test_a_state_can_be_given_to_a_step_once():
    network = plain_network()
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("8x1"))
    state = init_state(network, TX, collection)
    step = make_train_step(network, TX, collection)
    batches = [prepare(collection, make_batch(i, 8), train=True) for i in range(2)]
    new, _ = step(state, batches[0])
    with pytest.raises(
        ValueError, match="is gone: a state can be given to a step once"
    ):
        step(state, batches[1])
    new, _ = step(new, batches[1])
    assert int(new.step) == 2

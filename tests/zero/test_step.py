"""Every stage gives what one device gives, whatever the optimizer and the microbatches."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardjax as sj
from shardjax import zero
from shardjax.precision import LossScaling, Precision, with_master
from tests.zero.small import (
    RULES,
    distance,
    make_loss,
    plan_small,
    small_batch,
    small_params,
    train,
)

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "lamb": optax.lamb(1e-2, eps=1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "sgd and clip": optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.3)),
}


@cache
def reference(optimizer: str):
    """Parameters and norms of 20 steps on one device."""
    tx = OPTIMIZERS[optimizer]
    state, infos = train(plan_small("1x1", 0, tx), tx)
    return jax.device_get(state.params), infos


MESHES = ("8x1", "4x2")


def every_pair():
    """Optimizers, meshes, microbatches and stages: each value with each other at least
    once, in 16 of the 64 combinations."""
    for s, stage in enumerate(zero.STAGES):
        for o, optimizer in enumerate(OPTIMIZERS):
            mesh = MESHES[(s + o) % 2]
            yield optimizer, mesh, (1, 4)[(s // 2 + o // 2 + s) % 2], stage


def test_pairs_are_complete():
    values = [OPTIMIZERS, MESHES, (1, 4), zero.STAGES]
    for i, j in itertools.combinations(range(4), 2):
        found = {(case[i], case[j]) for case in every_pair()}
        assert found == set(itertools.product(values[i], values[j]))


def pytest_generate_tests(metafunc):
    """Gives the stages their combinations, all if `--all-combinations` asks for them."""
    names = ("optimizer", "mesh", "microbatches", "stage")
    if metafunc.function is test_stages_equal_one_device:
        everything = itertools.product(OPTIMIZERS, MESHES, (1, 4), zero.STAGES)
        wanted = metafunc.config.getoption("--all-combinations")
        metafunc.parametrize(names, list(everything if wanted else every_pair()))


def test_stages_equal_one_device(optimizer, mesh, microbatches, stage):
    tx = OPTIMIZERS[optimizer]
    plan = plan_small(mesh, stage, tx, RULES if mesh == "4x2" else ())
    state, infos = train(plan, tx, microbatches=microbatches)
    params, expected = reference(optimizer)
    assert distance(state.params, params) < 2e-5
    assert distance(small_params(), params) > 1e-3  # there was something to learn
    for info, wanted in zip(infos, expected, strict=True):
        assert info["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert info["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    for leaf, x in zip(plan.leaves, jax.tree.leaves(state.params), strict=True):
        assert x.sharding == jax.NamedSharding(plan.mesh, leaf.spec), leaf.path


@pytest.mark.parametrize("mesh", ["1x1", "1x8", "2x4"])
def test_other_meshes(mesh):
    tx = OPTIMIZERS["adamw"]
    plan = plan_small(mesh, 3, tx, RULES)
    state, _ = train(plan, tx, microbatches=2)
    assert distance(state.params, reference("adamw")[0]) < 2e-5


@pytest.mark.parametrize("remat", ["full", "dots", "sqrt:3", "offload:x"])
def test_recomputing_changes_nothing(remat):
    tx = OPTIMIZERS["adamw"]
    loss = make_loss(remat)
    if remat == "offload:x":
        loss = _named_loss(remat)
    state, _ = train(plan_small("8x1", 3, tx), tx, loss=loss)
    assert distance(state.params, reference("adamw")[0]) < 2e-5


def _named_loss(remat):
    from jax.ad_checkpoint import checkpoint_name

    from shardjax.remat import scan_layers

    def layer(x, params):
        x = checkpoint_name(x, "x")
        params = zero.gather(params)
        return x + jnp.tanh((x * params["scale"][None]) @ params["w1"]) @ params["w2"]

    def loss(params, batch):
        x = scan_layers(
            layer, params["embedding"][batch["x"]], params["blocks"], remat=remat
        )
        logits = x @ params["embedding"].T + params["bias"][None, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])

    return loss


def test_a_loss_that_gathers_nothing_runs_at_every_stage():
    def loss(params, batch):
        errors = batch @ params["w"] - 1
        return jnp.sum(errors**2), jnp.float32(len(errors))

    batch = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    params = {"w": np.ones((8, 8), np.float32)}
    results = []
    for stage in zero.STAGES:
        tx = optax.sgd(0.1)
        plan = zero.plan_zero(params, tx, sj.make_mesh("8x1"), stage, min_bytes=0)
        state = zero.init_state(params, tx, plan)
        state, _ = zero.make_step(loss, tx, plan)(state, batch)
        results.append(np.asarray(state.params["w"]))
    errors = batch @ params["w"] - 1
    expected = params["w"] - 0.1 * batch.T @ (2 * errors) / len(batch)
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_microbatches_add_up_each_with_its_weight():
    """One step by hand: only the third of four microbatches has much weight."""
    plan = plan_small("4x2", 2, optax.sgd(1.0), RULES)
    batch = small_batch(0)
    batch["weight"] = np.repeat([0.0, 0.0, 1.0, 0.25], 8).astype(np.float32)
    state = zero.init_state(small_params(), optax.sgd(1.0), plan)
    step = zero.make_step(make_loss(), optax.sgd(1.0), plan, microbatches=4)
    state, info = step(state, batch)

    def mean(params):
        total, weight = make_loss()(params | {"count": 3}, batch)
        return total / weight

    floats = {k: v for k, v in small_params().items() if k != "count"}
    value, grads = jax.jit(jax.value_and_grad(mean))(floats)
    assert float(info["loss"]) == pytest.approx(float(value), rel=1e-6)
    assert float(info["weight"]) == 10.0
    moved = jax.tree.map(lambda p, g: p - g, floats, grads)
    trained = {k: v for k, v in state.params.items() if k != "count"}
    assert distance(trained, moved) < 1e-6


def test_no_weight_at_all_moves_nothing():
    plan = plan_small("8x1", 2, optax.sgd(1.0))
    state = zero.init_state(small_params(), optax.sgd(1.0), plan)
    step = zero.make_step(make_loss(), optax.sgd(1.0), plan, microbatches=2)
    batch = small_batch(0) | {"weight": np.zeros(32, np.float32)}
    state, info = step(state, batch)
    assert distance(state.params, small_params()) == 0
    assert jax.tree.map(float, info) == {"loss": 0, "weight": 0, "grad_norm": 0}


def test_odd_leaves():
    """Unused, empty, tied and integer leaves, PRNG keys, and one with an odd size."""
    shared = np.ones((8, 4), np.float32)
    params = {
        "used": shared,
        "again": shared,
        "unused": np.ones((16, 2), np.float32),
        "empty": np.ones((0, 8), np.float32),
        "odd": np.ones((7, 5), np.float32),
        "scalar": np.float32(1),
        "count": np.int32(5),
        "key": jax.random.key(1),
    }

    def loss(params, batch):
        y = batch @ (params["used"] + params["again"])
        return jnp.sum(y) + jnp.sum(params["odd"]) + params["scalar"], jnp.float32(8)

    tx = optax.adam(0.1)
    for stage in zero.STAGES:
        plan = zero.plan_zero(params, tx, sj.make_mesh("8x1"), stage, min_bytes=0)
        state = zero.init_state(params, tx, plan)
        step = zero.make_step(loss, tx, plan)
        for _ in range(2):
            state, _ = step(state, np.ones((8, 8), np.float32))
        got = state.params
        assert np.all(np.asarray(got["unused"]) == 1)
        assert got["empty"].shape == (0, 8)
        assert int(got["count"]) == 5
        assert jnp.all(
            jax.random.key_data(got["key"]) == jax.random.key_data(params["key"])
        )
        np.testing.assert_allclose(got["used"], 0.8, rtol=1e-5)
        np.testing.assert_allclose(got["odd"], 0.8, rtol=1e-5)
        assert np.all(params["used"] == 1)


def test_parameters_may_be_made_in_parts():
    tx = optax.adam(0.1)
    plan = plan_small("8x1", 3, tx)
    made = zero.init_state(lambda: jax.tree.map(jnp.asarray, small_params()), tx, plan)
    given = zero.init_state(small_params(), tx, plan)
    assert distance(made.params, given.params) == 0
    assert made.params["embedding"].sharding.spec == plan.param_specs["embedding"]


def test_the_state_is_donated_but_not_what_it_was_made_of():
    params = jax.tree.map(jnp.asarray, small_params())
    tx = optax.sgd(0.1)
    plan = plan_small("1x1", 0, tx, params=params)
    state = zero.init_state(params, tx, plan)
    new, _ = zero.make_step(make_loss(), tx, plan)(state, small_batch(0))
    assert state.params["embedding"].is_deleted()
    assert not params["embedding"].is_deleted()
    assert distance(new.params, params) > 0


def test_keys_differ_by_step_microbatch_and_device_and_repeat_with_the_seed():
    def loss(params, batch, key):
        return params["w"][0] * jax.random.uniform(key), jnp.float32(1)

    def norms(seed):
        tx = optax.sgd(1.0)
        plan = zero.plan_zero({"w": np.ones(1, "f")}, tx, sj.make_mesh("2x1"), 1)
        state = zero.init_state({"w": np.ones(1, "f")}, tx, plan)
        step = zero.make_step(loss, tx, plan, microbatches=2, seed=seed)
        found = []
        for _ in range(3):
            state, info = step(state, np.ones((4, 1), np.float32))
            found.append(float(info["grad_norm"]))
        return found

    assert norms(1) == norms(1)
    assert len(set(norms(1) + norms(2))) == 6
    one = [
        float(jax.random.uniform(_key(1, 0, number, device)))
        for number in range(2)
        for device in range(2)
    ]
    assert len(set(one)) == 4
    assert norms(1)[0] == pytest.approx(np.mean(one), rel=1e-6)


def _key(seed, step, number, device):
    key = jax.random.key(seed)
    for word in (step, number, device):
        key = jax.random.fold_in(key, word)
    return key


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_clipping_by_the_step_equals_clipping_by_optax(stage):
    tx = optax.sgd(0.3)
    state, infos = train(plan_small("8x1", stage, tx), tx, clip_norm=0.3)
    params, expected = reference("sgd and clip")
    assert distance(state.params, params) < 2e-5
    assert infos[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)
    assert infos[0]["grad_norm"] > 0.3


@pytest.mark.parametrize("stage", zero.STAGES)
def test_bfloat16_computes_in_it_and_keeps_float32(stage):
    tx = OPTIMIZERS["adamw"]
    state, infos = train(
        plan_small("8x1", stage, tx, precision="bf16"), tx, microbatches=2
    )
    assert state.params["embedding"].dtype == jnp.float32
    assert 1e-5 < distance(state.params, reference("adamw")[0]) < 0.05
    assert infos[-1]["loss"] == pytest.approx(
        reference("adamw")[1][-1]["loss"], rel=0.02
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_master_copies_hold_what_bfloat16_parameters_lose(stage):
    tx = with_master(OPTIMIZERS["adamw"])
    params = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, small_params()
    )
    plan = plan_small("8x1", stage, tx, params=params)
    state, _ = train(plan, tx, params=params)
    assert state.params["embedding"].dtype == jnp.bfloat16
    master = state.opt_state.master["embedding"]
    assert master.dtype == jnp.float32
    assert not master.sharding.is_fully_replicated
    np.testing.assert_array_equal(
        master.astype(jnp.bfloat16), state.params["embedding"]
    )
    assert distance({"e": master}, {"e": reference("adamw")[0]["embedding"]}) < 0.05


SCALED = Precision(jnp.float16, scaling=LossScaling(2.0**10, growth_interval=3))


@pytest.mark.parametrize("stage", zero.STAGES)
def test_an_overflow_skips_the_step_on_all_devices(stage):
    """One example of one device overflows float16 in the second of five steps."""
    tx = optax.adam(optax.linear_schedule(1e-2, 0, 10))
    plan = plan_small("8x1", stage, tx, precision=SCALED)
    state = zero.init_state(small_params(), tx, plan)
    plain = make_loss()

    def loss(params, batch):
        total, weight = plain(params, batch)
        return total * jnp.max(batch["poison"]), weight

    step = zero.make_step(loss, tx, plan)
    seen = []
    for i in range(5):
        before = jax.device_get((state.params, state.opt_state))
        poison = np.ones(32, np.float32)
        poison[17] = np.inf if i == 1 else 1
        state, info = step(state, small_batch(i) | {"poison": poison})
        after = jax.device_get((state.params, state.opt_state))
        moved = distance(after[0], before[0])
        assert (moved == 0) == (i == 1)
        if i == 1:
            jax.tree.map(np.testing.assert_array_equal, before, after)
        seen.append((float(info["loss_scale"]), int(info["skipped"])))
    assert seen == [(1024, 0), (1024, 1), (512, 1), (512, 1), (512, 1)]
    assert float(state.loss_scale.scale) == 1024  # three good steps in a row
    assert int(state.step) == 5
    assert int(state.opt_state[0].count) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "`microbatches` must be positive, got 0"),
        ({"clip_norm": 0.0}, "`clip_norm` must be positive or None, got 0.0"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match=message):
        zero.make_step(make_loss(), tx, plan_small("1x1", 0, tx), **options)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: jnp.sum(b["weight"]), r"must return \(loss_sum, weight\)"),
        (lambda p, b: (b["weight"], 1.0), r"loss_sum .* must be one number, got shape"),
    ],
)
def test_bad_losses_are_refused_at_the_first_step(loss, message):
    tx = optax.sgd(0.1)
    plan = plan_small("8x1", 1, tx)
    state = zero.init_state(small_params(), tx, plan)
    with pytest.raises(ValueError, match=message):
        zero.make_step(loss, tx, plan)(state, small_batch(0))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_a_loss_returns_besides_comes_in_the_order_of_the_batch(microbatches):
    plan = plan_small("8x1", 2, optax.sgd(0.1))

    def loss(params, batch):
        total = jnp.sum(params["bias"]) * jnp.sum(batch["weight"])
        return total, jnp.sum(batch["weight"]), {"seen": 2 * batch["weight"]}

    gradients = zero.make_gradients(loss, plan, microbatches=microbatches, has_aux=True)
    batch = {"weight": np.arange(32, dtype=np.float32)}
    _, weight, _, aux = jax.jit(gradients)(small_params(), batch, 0)
    assert weight == batch["weight"].sum()
    np.testing.assert_array_equal(aux["seen"], 2 * batch["weight"])
    gradients = zero.make_gradients(lambda p, b: (1.0, 1.0), plan, has_aux=True)
    with pytest.raises(ValueError, match="with `has_aux` must return .*aux.*got tuple"):
        jax.eval_shape(gradients, small_params(), batch, 0)


def test_batches_that_do_not_divide_are_refused():
    tx = optax.sgd(0.1)
    plan = plan_small("8x1", 1, tx)
    state = zero.init_state(small_params(), tx, plan)
    step = zero.make_step(make_loss(), tx, plan, microbatches=3)
    with pytest.raises(
        ValueError, match=r"8 devices x 3 microbatches divide, got .*32"
    ):
        step(state, small_batch(0))


def test_a_part_that_was_not_gathered_says_so():
    tx = optax.sgd(0.1)
    plan = plan_small("8x1", 3, tx)
    state = zero.init_state(small_params(), tx, plan)

    def loss(params, batch):
        return jnp.sum(jnp.square(params["blocks"]["w1"])), jnp.float32(1)

    with pytest.raises(TypeError, match=r"Call shardjax.gather"):
        zero.make_step(loss, tx, plan)(state, small_batch(0))


def test_other_parameters_than_planned_are_refused():
    tx = optax.sgd(0.1)
    plan = plan_small("8x1", 1, tx)
    params = small_params()
    with pytest.raises(ValueError, match="must have the structure that was planned"):
        zero.init_state({"w": params["bias"]}, tx, plan)
    params["bias"] = params["bias"][1:]
    with pytest.raises(
        ValueError, match=r"bias was planned as float32\[41\], got float32\[40\]"
    ):
        zero.init_state(params, tx, plan)


@pytest.mark.parametrize(
    ("mesh", "stage", "name"),
    [("8x1", 1, "adafactor"), ("4x2", 2, "lamb"), ("4x2", 3, "adafactor")],
)
def test_everything_lies_as_planned_after_a_step_as_before(mesh, stage, name):
    tx = OPTIMIZERS[name]
    plan = plan_small(mesh, stage, tx, RULES if mesh == "4x2" else ())
    state, _ = train(plan, tx, steps=2)
    wanted = zero.state_shardings(plan)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    for x, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True
    ):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
        assert x.sharding.memory_kind == sharding.memory_kind


def test_a_users_rule_may_name_the_dim_to_split():
    tx = optax.sgd(0.1)
    rules = [("blocks/w1$", P(None, "data", None))]
    plan = plan_small("8x1", 3, tx, rules)
    assert plan.param_specs["blocks"]["w1"] == P(None, "data")
    state, _ = train(plan, tx, steps=3)
    expected, _ = train(plan_small("1x1", 0, tx), tx, steps=3)
    assert distance(state.params, expected.params) < 2e-5

"""The update of deep Q-learning: what it computes, on every stage of ZeRO and mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardjax as sj
from shardjax import rl, zero

ITEMS, WIDTH, HIDDEN, ACTIONS = 16, 8, 16, 3
RULES = [("^w1$", P(None, "model")), ("^w2$", P("model", None))]
TX = optax.adam(1e-2)
HARD = rl.HardCopy(3)


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w1": (rng.normal(size=(WIDTH, HIDDEN)) / 2).astype(np.float32),
        "w2": (rng.normal(size=(HIDDEN, ACTIONS)) / 2).astype(np.float32),
        "b": rng.normal(size=ACTIONS).astype(np.float32),
    }


def q_values(params, obs):
    x = obs["x"] * obs["scale"][:, None]
    return jnp.tanh(x @ params["w1"]) @ params["w2"] + params["b"][None]


def q_numpy(params, obs):
    x = obs["x"].astype(np.float64) * obs["scale"][:, None]
    return np.tanh(x @ params["w1"]) @ params["w2"] + params["b"]


def make_batch(seed=0, items=ITEMS):
    """Items of 3 steps, some at the ends of episodes, with a weight each."""
    rng = np.random.default_rng(seed)

    def obs():
        x = rng.normal(size=(items, WIDTH)).astype(np.float32)
        return {"x": x, "scale": rng.uniform(0.5, 2, items).astype(np.float32)}

    steps, terminated = rng.integers(1, 4, items), rng.random(items) < 0.3
    return {
        "obs_tm1": obs(),
        "a_tm1": rng.integers(ACTIONS, size=items),
        "r_t": (3 * rng.normal(size=items)).astype(np.float32),
        "discount_t": np.where(terminated, 0, 0.9**steps).astype(np.float32),
        "obs_t": obs(),
        "weights": rng.uniform(0.1, 1, items).astype(np.float32),
    }


def oracle(params, target, batch, double, huber):
    """TD errors and the loss, in float64."""
    every = np.arange(len(batch["r_t"]))
    q_t = q_numpy(target, batch["obs_t"])
    chosen = q_numpy(params, batch["obs_t"]) if double else q_t
    v_t = q_t[every, chosen.argmax(1)]
    td = batch["r_t"] + batch["discount_t"] * v_t
    td -= q_numpy(params, batch["obs_tm1"])[every, batch["a_tm1"]]
    size = np.abs(td)
    delta = np.inf if huber is None else huber
    each = np.where(size <= delta, 0.5 * td**2, huber and huber * (size - 0.5 * delta))
    return size, (batch["weights"] * each.astype(float)).mean()


@cache
def learner(mesh="1x1", stage=0, rule=HARD, tx=TX, **options):
    rules = RULES if mesh == "2x4" else ()
    abstract = make_params()
    plan = zero.plan_zero(abstract, tx, sj.make_mesh(mesh), stage, rules, min_bytes=0)
    return plan, rl.make_dqn_step(q_values, tx, plan, target=rule, **options)


def begin(plan, rule=HARD, tx=TX, target=None):
    state = rl.init_dqn(make_params(), tx, plan, rule)
    if target is not None:
        state = state.replace(
            target=jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), target, state.target
            )
        )
    return state


@pytest.mark.parametrize(
    ("double", "huber"), [(True, 1.0), (False, 0.5), (True, None)], ids=str
)
def test_td_errors_and_loss_are_those_of_the_papers(double, huber):
    plan, step = learner(double=double, huber=huber)
    target, batch = make_params(1), make_batch()
    _, info = step(begin(plan, target=target), batch)
    td, loss = oracle(make_params(), target, batch, double, huber)
    np.testing.assert_allclose(info["td"], td, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(info["loss"], loss, rtol=1e-5)
    assert huber is None or (td > huber).any() and (td < huber).any()


def test_weights_are_of_the_loss_and_not_of_the_td_errors():
    plan, step = learner(double=True, huber=1.0)
    batch = make_batch()
    _, info = step(begin(plan), batch)
    _, less = step(begin(plan), batch | {"weights": batch["weights"] / 8})
    assert info["td"].tolist() == less["td"].tolist()
    np.testing.assert_allclose(less["loss"], info["loss"] / 8, rtol=1e-6)
    np.testing.assert_allclose(less["grad_norm"], info["grad_norm"] / 8, rtol=1e-5)
    alike = {k: v for k, v in batch.items() if k != "weights"}
    _, whole = step(begin(plan), alike)
    ones = batch | {"weights": np.ones(ITEMS, np.float32)}
    assert whole["loss"] == step(begin(plan), ones)[1]["loss"]


def test_nothing_comes_after_the_end_of_an_episode_nor_of_items_without_weight():
    plan, step = learner(double=True, huber=1.0)
    batch = make_batch()
    clean, _ = step(begin(plan), batch)
    ended = batch["discount_t"] == 0
    batch["obs_t"]["x"][ended] = np.nan
    again, info = step(begin(plan), batch)
    assert 0 < ended.sum() < ITEMS and np.isfinite(info["td"]).all()
    assert_equal(again.params, clean.params)
    # padding: as if the items were not there
    batch = make_batch()
    keep = np.arange(ITEMS) < ITEMS // 2
    padded = jax.tree.map(np.copy, batch)
    padded["weights"][~keep] = 0
    padded["r_t"][~keep] = np.nan
    padded["obs_tm1"]["x"][~keep] = np.inf
    state, info = step(begin(plan), padded)
    halved = jax.tree.map(lambda x: x[: ITEMS // 2], batch)
    other, wanted = step(begin(plan), halved)
    np.testing.assert_allclose(info["loss"], wanted["loss"], rtol=1e-6)
    assert_close(state.params, other.params, 1e-6)


def assert_equal(tree, other):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(tree, other, atol):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


def train(mesh, stage, rule, updates=7, **options):
    plan, step = learner(mesh, stage, rule, **options)
    state, tds = begin(plan, rule), []
    for number in range(updates):
        state, info = step(state, make_batch(number))
        tds.append(info["td"])
    return state, np.array(tds)


@cache
def reference(rule):
    state, tds = train("1x1", 0, rule, clip_norm=0.5)
    return jax.device_get((state.params, state.target)), tds


@pytest.mark.parametrize(
    ("mesh", "stage", "rule", "microbatches"),
    [
        ("8x1", 0, HARD, 2),
        ("8x1", 3, HARD, 1),
        ("8x1", 2, rl.Polyak(0.1), 1),
        ("8x1", 3, rl.Polyak(0.1), 1),
        ("2x4", 1, HARD, 1),
        ("2x4", 3, HARD, 1),
    ],
    ids=str,
)
def test_every_stage_and_mesh_learns_the_same(mesh, stage, rule, microbatches):
    state, tds = train(mesh, stage, rule, clip_norm=0.5, microbatches=microbatches)
    (params, target), wanted = reference(rule)
    assert_close(state.params, params, 2e-5)
    assert_close(state.target, target, 2e-5)
    np.testing.assert_allclose(tds, wanted, atol=1e-4)  # each item's own, in order
    plan, _ = learner(mesh, stage, rule, clip_norm=0.5, microbatches=microbatches)
    for leaf, x, t in zip(
        plan.leaves,
        jax.tree.leaves(state.params),
        jax.tree.leaves(state.target),
        strict=True,
    ):
        wanted = jax.NamedSharding(plan.mesh, leaf.spec)
        assert x.sharding.is_equivalent_to(wanted, x.ndim), leaf.path
        assert t.sharding.is_equivalent_to(wanted, t.ndim), leaf.path
    if stage == 3:
        assert state.target["w1"].addressable_data(0).size < HIDDEN * WIDTH


def test_updates_in_one_program_are_those_one_by_one():
    rule = HARD
    plan, step = learner("8x1", 3, rule, clip_norm=0.5, scan=True)
    batches = [make_batch(number) for number in range(7)]
    together = jax.tree.map(lambda *x: np.stack(x), *batches)
    state, info = step(begin(plan), together)
    one_by_one, tds = train("8x1", 3, rule, clip_norm=0.5, microbatches=1)
    assert_close(state.params, one_by_one.params, 1e-6)
    assert_close(state.target, one_by_one.target, 1e-6)
    np.testing.assert_allclose(info["td"], tds, atol=1e-5)
    assert info["loss"].shape == (7,) and state.step == 7


def test_the_target_is_the_parameters_as_they_were_when_it_was_copied():
    plan, step = learner("8x1", 3, HARD, clip_norm=0.5, microbatches=1)
    state = begin(plan)

    def read(tree):  # of copies: an array that NumPy looks at is not given away
        return jax.device_get(jax.tree.map(jnp.copy, tree))

    wanted = read(state.params)
    for number in range(1, 7):
        old = state
        state, _ = step(state, make_batch(number))
        if number % 3 == 0:
            wanted = read(state.params)
        assert_equal(read(state.target), wanted)
        # parameters, optimizer state and target were donated, each to one of the new
        for x in jax.tree.leaves((old.params, old.opt_state, old.target)):
            assert x.is_deleted()
    with pytest.raises(
        ValueError, match="is gone: a state can be given to a step once"
    ):
        step(old, make_batch())


def test_a_target_that_is_the_parameters_is_refused():
    plan, step = learner("8x1", 3, HARD, clip_norm=0.5, microbatches=1)
    state = begin(plan)
    with pytest.raises(ValueError, match="params/b and target/b are the same"):
        step(state.replace(target=state.params), make_batch())


CHAIN, DISCOUNT = 5, 0.8


def _chain_values():
    """Of a chain by value iteration: 0 goes left, 1 right; right of the end is 1, over."""
    q = np.zeros((CHAIN, 2))
    for _ in range(200):
        v = q.max(1)
        q[:, 0] = DISCOUNT * v[np.maximum(np.arange(CHAIN) - 1, 0)]
        q[:, 1] = np.append(DISCOUNT * v[1:], 1.0)
    return q


def test_it_finds_the_values_of_a_chain_whose_episodes_are_cut_and_end():
    # episodes of at most 3 steps: if their cuts counted as ends, values would be too low
    rng = np.random.default_rng(0)
    n_step, items = rl.NStep(2, DISCOUNT, 64), []
    at, age = rng.integers(CHAIN, size=64), np.zeros(64, int)
    for _ in range(60):
        # the best action mostly: items of several steps are of what was done
        action = np.where(rng.random(64) < 0.02, 0, 1)
        after = np.maximum(at + 2 * action - 1, 0)
        terminated, age = after == CHAIN, age + 1
        truncated = ~terminated & (age == 3)
        obs, last = (
            np.eye(CHAIN + 1, dtype="f4")[at],
            np.eye(CHAIN + 1, dtype="f4")[after],
        )
        items.append(
            n_step.add(
                obs=obs,
                action=action,
                reward=terminated.astype("f4"),
                next_obs=last,
                terminated=terminated,
                truncated=truncated,
            )
        )
        done = terminated | truncated
        at, age = np.where(done, rng.integers(CHAIN, size=64), after), age * ~done
    items = jax.tree.map(lambda *x: np.concatenate(x), *items)
    keep = items["a_tm1"] == 1
    items = jax.tree.map(lambda x: x[keep], items)

    params, tx = {"w": np.zeros((CHAIN + 1, 2), np.float32)}, optax.sgd(1.0)
    plan = zero.plan_zero(params, tx, sj.make_mesh("1x1"), 0)
    rule = rl.HardCopy(10)
    step = rl.make_dqn_step(
        lambda p, obs: obs @ p["w"], tx, plan, target=rule, scan=True, double=True
    )
    draws = rng.integers(len(items["r_t"]), size=(400, 64))
    state, _ = step(
        rl.init_dqn(params, tx, plan, rule), jax.tree.map(lambda x: x[draws], items)
    )
    learned = np.asarray(state.params["w"])[:CHAIN, 1]
    np.testing.assert_allclose(learned, _chain_values()[:, 1], atol=0.03)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"r_t": None}, ValueError, "must have the fields obs_tm1.*, got a_tm1, disc"),
        (
            {"done": np.zeros(ITEMS)},
            ValueError,
            "must have the fields.*got a_tm1.*done",
        ),
        (
            {"weights": np.ones((ITEMS, 1))},
            ValueError,
            r"`weights`.*\[16\], got.*16, 1\]",
        ),
        ({"a_tm1": np.ones(ITEMS)}, TypeError, "`a_tm1`.*must be integers.*got float"),
        ({"discount_t": np.ones(3)}, ValueError, r"`discount_t`.*got shape \[3\]"),
    ],
)
def test_wrong_batches_are_refused(change, error, message):
    plan, step = learner(double=True, huber=1.0)
    batch = {k: v for k, v in (make_batch() | change).items() if v is not None}
    with pytest.raises(error, match=message):
        step(begin(plan), batch)


def test_wrong_learners_are_refused():
    plan, _ = learner()
    for options, message in (
        ({"huber": 0}, "`huber` must be positive or None, got 0"),
        ({"clip_norm": 0}, "`clip_norm` must be positive or None, got 0"),
        ({"microbatches": 0}, "`microbatches` must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            rl.make_dqn_step(q_values, TX, plan, target=HARD, **options)
    with pytest.raises(TypeError, match="rule of a target must be"):
        rl.make_dqn_step(q_values, TX, plan, target=100)
    with pytest.raises(ValueError, match="state of `tx`"):
        rl.make_dqn_step(q_values, optax.sgd(0.1), plan, target=HARD)
    step = rl.make_dqn_step(lambda p, o: o["x"][:, 0], TX, plan, target=HARD)
    with pytest.raises(
        ValueError, match=r"`q_values` must return.*\[16, actions\].*\(16,"
    ):
        step(begin(plan), make_batch())
    host = zero.plan_zero(make_params(), TX, sj.make_mesh("8x1"), 3, offload="all")
    with pytest.raises(ValueError, match="parameters on the devices.*offload 'all'"):
        rl.init_dqn(make_params(), TX, host, HARD)

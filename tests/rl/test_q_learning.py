"""Q-learning over tables equals a plain program that holds and copies everything whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax import rl, train
from shardjax.checkpoint import Checkpointer
from shardjax.data import Batch
from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Jagged,
    Storage,
    TableSpec,
    lookup,
    uniform,
)
from shardjax.mesh import make_mesh
from shardjax.network import Network
from shardjax.state import init_state, plan_network

ITEMS, ACTIONS, DIM, BATCH = 40, 3, 4, 16
ROW_RATE, RATE = 0.1, 0.01


def values(params, state, action, following, actions):
    """Q of an action and of those that follow, from their vectors."""
    q_tm1 = jnp.sum((state @ params["w"]) * action, axis=-1)
    q_t = jnp.einsum("bd,bad->ba", following @ params["w"], actions)
    return q_tm1, q_t


def network() -> Network:
    def apply(params, state, dense, embeddings, *, train):
        actions = embeddings["actions"]
        q_tm1, q_t = values(
            params,
            *(embeddings[f] for f in ("state", "action", "following")),
            actions.values,
        )
        q_t = jnp.where(actions.mask, q_t, -jnp.inf)
        return rl.QValues(q_tm1 + dense[:, 0], q_t), state

    w = np.random.default_rng(0).normal(size=(DIM, DIM)).astype(np.float32)
    return Network(apply, {"w": w}, {})


def items(n, seed=0):
    """Items of a replay, some terminal, as arrays."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        bags = [rng.permutation(np.resize([1, 2], BATCH)) for _ in range(2)]
        counts = rng.integers(1, ACTIONS + 1, BATCH)
        yield {
            "state": Jagged(rng.integers(0, ITEMS, bags[0].sum()), bags[0]),
            "following": Jagged(rng.integers(0, ITEMS, bags[1].sum()), bags[1]),
            "action": rng.integers(0, ITEMS, BATCH).astype(np.uint64),
            "actions": Jagged(rng.integers(0, ITEMS, counts.sum()), counts),
            "r_t": rng.normal(size=BATCH).astype(np.float32),
            "discount_t": 0.9 * rng.integers(0, 2, BATCH).astype(np.float32),
            "weights": rng.uniform(0.2, 1, BATCH).astype(np.float32),
            "bias": rng.normal(size=BATCH).astype(np.float32),
        }


def batch_of(item) -> Batch:
    jagged = {k: x for k, x in item.items() if isinstance(x, Jagged)}
    dense = np.stack([item["bias"], item["discount_t"]], axis=1)
    keys = item["action"][None]
    return Batch(item["r_t"], dense, keys, ("action",), jagged, item["weights"])


class Run:
    """Training by `make_train_step`."""

    def __init__(self, mesh="1x1", stage=0, storage=None, size=None, **more):
        self.objective = rl.QLearning(**({"target": rl.HardCopy(3)} | more))
        tx = rl.keep_target(optax.adam(ROW_RATE), self.objective.target)
        item = TableSpec("item", DIM, tx, initializer=uniform(0.5))
        self.collection = EmbeddingCollection(
            {
                "state": FeatureSpec(item, combiner="mean"),
                "following": FeatureSpec(item, combiner="mean"),
                "action": FeatureSpec(item),
                "actions": FeatureSpec(item, combiner="none", max_length=ACTIONS),
            },
            mesh=make_mesh(mesh),
            storage=storage,
        )
        net, tx = network(), optax.adam(RATE)
        plan = plan_network(net, tx, self.collection, stage, min_bytes=0)
        self.state = init_state(
            net, tx, self.collection, zero=plan, target=self.objective.target
        )
        self.step = train.make_train_step(
            net,
            tx,
            self.collection,
            zero=plan,
            objective=self.objective,
            microbatch_size=size,
        )
        self.losses, self.errors = [], []

    def train(self, made):
        for item in made:
            batch = train.prepare(self.collection, batch_of(item), train=True)
            self.state, info = self.step(self.state, batch)
            self.losses.append(float(info["loss"]))
            self.errors.append(np.asarray(info["predictions"])[: batch.size])
        return self

    def rows(self, view=None):
        read = self.collection.lookup_rows(
            self.state.tables, "item", np.arange(ITEMS), view
        )
        return np.where(read["found"][:, None], read["rows"], np.nan)

    def params(self):
        return [np.asarray(self.state.params["w"]), np.asarray(self.state.target["w"])]


def mean(rows, bags):
    index = bags.values.astype(np.int32)
    return lookup.lookup(rows, index, bags.lengths, combiner="mean")


def plain(made, first, every=3, double=True, huber=1.0):
    """Everything dense: the table, its gradient, its copy. Rows move if they are used."""
    params = {"w": jnp.asarray(network().params["w"]), "rows": jnp.asarray(first)}
    txs = {"w": optax.adam(RATE), "rows": optax.adam(ROW_RATE)}
    states = {k: txs[k].init(x) for k, x in params.items()}
    target, losses, errors = params, [], []
    for step, item in enumerate(made):
        if step % every == 0:
            target = params
        used = np.zeros(ITEMS, bool)
        used[item["action"].astype(int)] = True
        for name in ("state", "following", "actions"):
            used[item[name].values.astype(int)] = True

        def outputs(p, item=item):
            x = item["actions"]
            actions, mask = lookup.lookup_sequence(
                p["rows"], x.values.astype(np.int32), x.lengths, ACTIONS
            )
            action = p["rows"][item["action"].astype(int)]
            q_tm1, q_t = values(
                p,
                mean(p["rows"], item["state"]),
                action,
                mean(p["rows"], item["following"]),
                actions,
            )
            return q_tm1 + item["bias"], jnp.where(mask, q_t, -jnp.inf)

        def loss(p, item=item, target=target):
            q_tm1, q_t = outputs(p)
            _, lagged = outputs(target)
            best = (q_t if double else lagged).argmax(1)
            v = jnp.take_along_axis(lagged, best[:, None], 1)[:, 0]
            td = jax.lax.stop_gradient(item["r_t"] + item["discount_t"] * v) - q_tm1
            big = jnp.abs(td) > huber
            each = jnp.where(big, huber * (jnp.abs(td) - huber / 2), td * td / 2)
            return (item["weights"] * each).mean(), jnp.abs(td)

        (value, td), grads = jax.value_and_grad(loss, has_aux=True)(params)
        losses.append(float(value))
        errors.append(np.asarray(td))
        rows, states["rows"] = lookup.update(
            txs["rows"], params["rows"], states["rows"], grads["rows"], used
        )
        updates, states["w"] = txs["w"].update(grads["w"], states["w"], params["w"])
        params = {"w": optax.apply_updates(params["w"], updates), "rows": rows}
    if len(losses) % every == 0:
        target = params
    return losses, errors, params, target


STEPS = 8


@pytest.fixture(scope="module")
def made():
    return list(items(STEPS))


@pytest.fixture(scope="module")
def first(made):
    """The first value of each row."""
    run = Run(huber=1.0)
    every = np.arange(ITEMS, dtype=np.uint64)
    ones = Jagged(every, np.ones(ITEMS, np.int32))
    batch = Batch(
        np.zeros(ITEMS),
        np.zeros((ITEMS, 2)),
        every[None],
        ("action",),
        dict.fromkeys(("state", "following", "actions"), ones),
    )
    plan = train.prepare(run.collection, batch, train=True).plan
    tables = run.collection.apply_fills(run.state.tables, plan)
    run.state = run.state.replace(tables=tables)
    return run.rows()


def close(run, expected):
    losses, errors, params, target = expected
    np.testing.assert_allclose(run.losses, losses, rtol=2e-5)
    np.testing.assert_allclose(run.errors, errors, rtol=1e-4, atol=2e-5)
    for found, wanted in zip(run.params(), (params["w"], target["w"]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    for view, wanted in ((None, params["rows"]), (rl.read_target, target["rows"])):
        found = run.rows(view)
        used = ~np.isnan(found)
        assert used.mean() > 0.9
        np.testing.assert_allclose(
            found[used], np.asarray(wanted)[used], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("1x1", {}),
        ("1x1", {"size": 5}),
        ("8x1", {"stage": 3}),
        ("2x4", {"stage": 1}),
    ],
)
def test_steps_equal_a_plain_program(mesh, more, made, first):
    close(Run(mesh, **more).train(made), plain(made, first))


def test_single_q_learning_with_a_squared_loss(made, first):
    run = Run(double=False, huber=None).train(made)
    close(run, plain(made, first, double=False, huber=1e4))


@pytest.mark.parametrize("rule", [rl.HardCopy(3), rl.Polyak(0.1)], ids=str)
def test_rows_in_ram_and_a_resume_change_no_bit(rule, made, tmp_path):
    whole = Run("8x1", target=rule).train(made)
    tiered = Run("8x1", storage=Storage(device_rows=64), target=rule)
    half = STEPS // 2  # between two copies
    tiered.train(made[:half])
    with Checkpointer(tmp_path, collection=tiered.collection) as checkpoints:
        checkpoints.save(half, tiered.state)
    after = Run("8x1", storage=Storage(device_rows=64), target=rule)
    with Checkpointer(tmp_path, collection=after.collection) as checkpoints:
        after.state = checkpoints.restore(after.state).state
    after.train(made[half:])
    assert tiered.losses + after.losses == whole.losses
    for view in (None, rl.read_target):
        np.testing.assert_array_equal(after.rows(view), whole.rows(view))
    for found, expected in zip(after.params(), whole.params(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_items_without_weight_have_no_part(made):
    run, other = Run(), Run()
    for item in made[:2]:
        weights = item["weights"] * (np.arange(BATCH) % 2)
        run.train([{**item, "weights": weights}])
        changed = np.where(weights == 0, np.nan, item["r_t"]).astype(np.float32)
        other.train([{**item, "weights": weights, "r_t": changed}])
    assert run.losses == other.losses
    np.testing.assert_array_equal(run.rows(), other.rows())


def test_what_does_not_fit_is_refused(made):
    objective = rl.QLearning(rl.HardCopy(3))
    run = Run()
    make = train.make_train_step
    with pytest.raises(ValueError, match="must not come with `loss`"):
        make(
            network(),
            optax.sgd(0.1),
            run.collection,
            objective=objective,
            loss=optax.losses.squared_error,
        )
    with pytest.raises(
        ValueError, match=r"HardCopy\(every=5\), got HardCopy\(every=3\)"
    ):
        make(
            network(),
            optax.sgd(0.1),
            run.collection,
            objective=rl.QLearning(rl.HardCopy(5)),
        )
    with pytest.raises(TypeError, match="the rule of a target"):
        rl.QLearning(3)
    with pytest.raises(ValueError, match="`huber` must be positive or None, got 0"):
        rl.QLearning(huber=0)


def test_networks_that_return_something_else_are_refused():
    objective, one = rl.QLearning(), jnp.ones(4)
    right = rl.QValues(one, jnp.ones((4, 2)))
    with pytest.raises(TypeError, match="must return `QValues"):
        objective((one, one), right, one, jnp.ones((4, 1)))
    for wrong in (rl.QValues(jnp.ones((4, 1)), right.q_t), rl.QValues(one, one)):
        with pytest.raises(ValueError, match="must have shapes"):
            objective(right, wrong, one, jnp.ones((4, 1)))
    with pytest.raises(ValueError, match="must be the discounts"):
        objective(right, right, one, jnp.ones((4, 0)))


def test_an_episode_that_is_over_needs_no_actions():
    q = rl.QValues(jnp.zeros(1), jnp.full((1, 2), -jnp.inf))
    _, errors = rl.QLearning()(q, q, jnp.ones(1), jnp.zeros((1, 1)))
    assert errors.tolist() == [1.0]

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax.embed import linen, plan_tables

ROWS, DIM, LAYERS = 12, 4, 2


class Layer(nn.Module):
    embed: type

    @nn.compact
    def __call__(self, x, ids):
        return jnp.tanh(nn.Dense(DIM)(x) + self.embed(ROWS, DIM)(ids)), None


class Towers(nn.Module):
    """A stack of layers, each with a table, beside one table."""

    embed: type

    @nn.compact
    def __call__(self, users, ids):
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )(self.embed)
        user = self.embed(ROWS, DIM, name="user")(users)
        x, _ = layers(user, ids)
        return jnp.sum(x * user, -1)


def test_towers_train_as_those_of_flax():
    users, ids = jnp.array([3, 3, 0]), jnp.array([11, 2, 2])
    own, theirs = Towers(linen.Embed), Towers(nn.Embed)
    params, same = (
        jax.jit(model.init)(jax.random.key(0), users, ids)["params"]
        for model in (own, theirs)
    )
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(same)
    )
    paths = linen.table_paths(own, users, ids)
    assert len(paths) == 2 and "user/embedding" in paths
    plan = plan_tables(params, paths, optax.sgd(0.5))

    def make_loss(model):
        def loss(params, users, ids):
            return jnp.sum((model.apply({"params": params}, users, ids) - 1) ** 2)

        return loss

    grads = jax.jit(jax.grad(make_loss(theirs)))(same, users, ids)
    wanted = jax.tree.map(lambda p, g: p - 0.5 * g, same, grads)
    dense = plan.split(params)
    step = jax.jit(plan.value_and_grad(make_loss(own)))
    _, grads, rows, tables = step(dense, plan.init(params), users, ids)
    dense = jax.tree.map(lambda p, g: p - 0.5 * g, dense, grads)
    got = plan.join(dense, jax.jit(plan.update)(tables, rows))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_bags_pool_rows():
    layer = linen.EmbeddingBag(ROWS, DIM, combiner="mean", padding_id=-1)
    ids = jnp.array([[3, 5], [-1, 2], [-1, -1]])
    variables = layer.init(jax.random.key(0), ids)
    table = jnp.asarray(variables["params"]["embedding"])
    wanted = [table[jnp.array([3, 5])].mean(0), table[2], np.zeros(DIM)]
    np.testing.assert_allclose(layer.apply(variables, ids), wanted, rtol=1e-6)


def test_a_tied_head_is_refused_in_a_step():
    class Tied(linen.Embed):
        def __call__(self, ids):
            return self.attend(super().__call__(ids))

    model, ids = Tied(ROWS, DIM), jnp.arange(2)
    params = model.init(jax.random.key(0), ids)["params"]
    plan = plan_tables(params, linen.table_paths(model, ids), optax.sgd(0.5))

    def loss(params):
        return model.apply({"params": params}, ids).sum()

    with pytest.raises(TypeError, match="tied output head.*sparse=False"):
        plan.value_and_grad(loss)(plan.split(params), plan.init(params))


def test_words_that_mean_nothing_are_refused():
    ids = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="`bad_ids` must be one of .*'wrap'"):
        linen.Embed(3, 2, bad_ids="wrap").init(jax.random.key(0), ids)
    with pytest.raises(ValueError, match="`combiner` must be one of .*'max'"):
        linen.EmbeddingBag(3, 2, combiner="max").init(jax.random.key(0), ids)

"""Models that look their tables up themselves, written as a user would."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardjax import embed
from shardjax.embed import plan_tables, table_paths

VOCAB, DIM, LAYERS, LENGTH = 40, 8, 2, 6


class Block(nnx.Module):
    """Attention and an MLP, with a bias per layer and token."""

    def __init__(self, Embed, rngs):
        self.query = nnx.Linear(DIM, DIM, rngs=rngs)
        self.value = nnx.Linear(DIM, DIM, rngs=rngs)
        self.bias = Embed(VOCAB, DIM, rngs=rngs)

    def __call__(self, x, tokens):
        x = x + self.bias(tokens)
        scores = self.query(x) @ x.T / jnp.sqrt(DIM)
        scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
        return x + jnp.tanh(jax.nn.softmax(scores) @ self.value(x))


class Transformer(nnx.Module):
    """One sequence to the logits of each next token."""

    def __init__(self, Embed, rngs, head=None):
        self.token = Embed(VOCAB, DIM, rngs=rngs)
        self.position = Embed(LENGTH, DIM, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def make_blocks(rngs):
            return Block(Embed, rngs)

        self.blocks = make_blocks(rngs)
        self.head = head or nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.token(tokens) + self.position(jnp.arange(len(tokens)))

        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block, tokens):
            return block(x, tokens)

        return self.head(run(x, self.blocks, tokens))


def next_token_loss(model, tokens):
    each = nnx.vmap(lambda model, tokens: model(tokens), in_axes=(None, 0))
    logits = each(model, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 9, (4, LENGTH + 1)))


@pytest.fixture(scope="module")
def trained_transformer():
    """Parameters after two steps of the loop that is written for nnx.Embed."""
    return train_densely(Transformer(nnx.Embed, nnx.Rngs(0)))


def train_densely(model):
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        value, grads = nnx.value_and_grad(next_token_loss)(model, tokens)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer, TOKENS)) for _ in range(2)]
    return values, nnx.to_pure_dict(nnx.state(model, nnx.Param))


def check_equal(got, wanted):
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got[1], wanted[1]
    )


def test_a_transformer_trains_its_rows_alone(trained_transformer):
    model = Transformer(embed.Embed, nnx.Rngs(0))
    assert table_paths(model) == (
        "blocks/bias/embedding/value",
        "position/embedding/value",
        "token/embedding/value",
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    plan = plan_tables(params, table_paths(params), optax.sgd(0.5))
    tx = optax.sgd(0.5)
    dense, tables = plan.split(params), plan.init(params)

    def loss(params, tokens):
        return next_token_loss(nnx.merge(graph, params, rest), tokens)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(dense, opt_state, tables, tokens):
        value, grads, rows, tables = plan.value_and_grad(loss)(dense, tables, tokens)
        updates, opt_state = tx.update(grads, opt_state, dense)
        tables = plan.update(tables, rows)
        return value, optax.apply_updates(dense, updates), opt_state, tables

    opt_state, values = tx.init(dense), []
    for _ in range(2):
        value, dense, opt_state, tables = step(dense, opt_state, tables, TOKENS)
        values.append(float(value))
    model = nnx.merge(graph, plan.join(dense, tables), rest)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    check_equal((values, params), trained_transformer)


def test_a_loop_that_knows_nothing_of_tables_trains_them_whole(trained_transformer):
    got = train_densely(Transformer(embed.Embed, nnx.Rngs(0)))
    check_equal(got, trained_transformer)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_embed_equals_that_of_flax(dtype):
    arguments = {"dtype": dtype, "param_dtype": jnp.float32}
    own, theirs = (
        cls(5, 3, rngs=nnx.Rngs(7), **arguments) for cls in (embed.Embed, nnx.Embed)
    )
    assert isinstance(own, nnx.Embed) and isinstance(own.embedding, nnx.Param)
    np.testing.assert_array_equal(own.embedding[...], theirs.embedding[...])
    ids = jnp.array([[4, 0], [2, 2]], jnp.uint8)
    assert own(ids).dtype == theirs(ids).dtype
    np.testing.assert_array_equal(own(ids), theirs(ids))
    np.testing.assert_array_equal(own.attend(own(ids)), theirs.attend(theirs(ids)))


def test_ids_outside_of_a_table_of_one_row_are_seen():
    layer = embed.Embed(1, 2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(
        jnp.isnan(layer(jnp.array([0, 1]))), [[False] * 2, [True] * 2]
    )


def test_metadata_stays_with_the_table():
    layer = embed.Embed(3, 2, rngs=nnx.Rngs(0), embedding_metadata={"note": "kept"})
    assert isinstance(layer.embedding, embed.Table)
    assert layer.embedding.get_metadata()["note"] == "kept"


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_pool_rows(combiner):
    bag = embed.EmbeddingBag(9, 2, combiner=combiner, padding_id=-1, rngs=nnx.Rngs(0))
    ids = jnp.array([[3, 3, -1], [5, -1, -1], [-1, -1, -1]])
    table = np.asarray(bag.embedding[...])
    divisor = {"sum": (1, 1), "mean": (2, 1), "sqrtn": (2**0.5, 1)}[combiner]
    wanted = [2 * table[3] / divisor[0], table[5] / divisor[1], np.zeros(2)]
    np.testing.assert_allclose(bag(ids), wanted, rtol=1e-6)


def tied(sparse):
    token = embed.Embed(VOCAB, DIM, sparse=sparse, rngs=nnx.Rngs(1))

    class Tied(nnx.Module):
        def __init__(self):
            self.token, self.user = token, embed.Embed(7, DIM, rngs=nnx.Rngs(2))

        def __call__(self, ids):
            return self.token.attend(self.token(ids) + self.user(ids))

    return Tied()


def test_tied_tables_are_left_to_the_dense_optimizer_or_refused():
    ids = jnp.arange(3)

    def split_loss(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        plan = plan_tables(params, table_paths(model), optax.sgd(1.0))

        def loss(params):
            return jnp.sum(nnx.merge(graph, params, rest)(ids) ** 2)

        return plan, params, loss

    plan, params, loss = split_loss(tied(sparse=False))
    grads = jax.jit(jax.grad(loss))(params)
    _, dense, rows, tables = jax.jit(plan.value_and_grad(loss))(
        plan.split(params), plan.init(params)
    )
    np.testing.assert_allclose(
        dense["token"]["embedding"][...], grads["token"]["embedding"][...], rtol=1e-5
    )
    moved = plan.join(plan.split(params), jax.jit(plan.update)(tables, rows))
    np.testing.assert_allclose(
        moved["user"]["embedding"][...],
        params["user"]["embedding"][...] - grads["user"]["embedding"][...],
        rtol=1e-5,
    )
    plan, params, loss = split_loss(tied(sparse=True))
    with pytest.raises(TypeError, match="tied output head.*sparse=False"):
        plan.value_and_grad(loss)(plan.split(params), plan.init(params))


def test_words_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="`bad_ids` must be one of .*'wrap'"):
        embed.Embed(3, 2, bad_ids="wrap", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`combiner` must be one of .*'max'"):
        embed.EmbeddingBag(3, 2, combiner="max", rngs=nnx.Rngs(0))

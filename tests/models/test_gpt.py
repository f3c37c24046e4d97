"""The GPT: its definition, what it may depend on, remat, sizes and errors."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from shardjax.mesh import make_mesh
from shardjax.models import gpt
from shardjax.models.transformer import (
    NAMES,
    TP_RULES,
    apply_block,
    rms_norm,
    rotary_turns,
    stacked_params,
)
from shardjax.partition import check_specs, leaf_path, match_specs, named_shardings

SIZES = {"vocab": 17, "dim": 16, "layers": 4, "heads": 4}
LEARNED = {"positions": "learned", "seq_len": 12}
REMATS = ["none", "full", "dots", "sqrt", f"save:{','.join(NAMES)}", "offload:block_in"]


def make(**changes):
    return gpt.GPT(**{**SIZES, **changes}, rngs=nnx.Rngs(3))


def make_tokens(batch=3, seq=8, seed=0):
    tokens = np.random.default_rng(seed).integers(0, SIZES["vocab"], (batch, seq))
    return jnp.asarray(tokens, jnp.uint8)


def loss_of(model):
    """The mean loss as a function of the parameters, and the parameters."""
    graph, params = nnx.split(model, nnx.Param)

    def loss(params, tokens):
        weights = jnp.ones((len(tokens), tokens.shape[1] - 1))
        total, weight = gpt.next_token_loss(nnx.merge(graph, params), tokens, weights)
        return total / weight

    return loss, params


def reference_logits(model, tokens):
    """NumPy float64, one layer and one head after the other."""
    p = {k: np.asarray(v, np.float64) for k, v in stacked_params(model.blocks).items()}
    embedding = np.asarray(model.embedding[...], np.float64)
    batch, seq = tokens.shape
    head_dim = model.dim // model.heads
    places = np.arange(seq)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def turn(x):
        half = head_dim // 2
        angles = places[:, None] / 10000 ** (np.arange(half) / half)
        turned = x[..., :half] + 1j * x[..., half:]
        turned = turned * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    x = embedding[np.asarray(tokens)]
    if model.positions == "learned":
        x = x + np.asarray(model.position[...], np.float64)[:seq]
    for layer in range(model.layers):
        y = norm(x, p["attention_norm"][layer])
        for head in range(model.heads):
            q, k, v = (y @ p["qkv"][layer, :, i, head] for i in range(3))
            if model.positions == "rotary":
                q, k = turn(q), turn(k)
            scores = np.einsum("bqd,bkd->bqk", q, k) / np.sqrt(head_dim)
            scores = np.where(places[:, None] >= places, scores, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = scores / scores.sum(-1, keepdims=True) @ v
            x = x + mixed @ p["attention_out"][layer, head]
        hidden = norm(x, p["mlp_norm"][layer]) @ p["mlp_in"][layer]
        inner = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
        x = x + hidden * (1 + np.tanh(inner)) / 2 @ p["mlp_out"][layer]
    return norm(x, np.asarray(model.norm[...], np.float64)) @ embedding.T


@pytest.mark.parametrize("positions", [{}, LEARNED], ids=["rotary", "learned"])
def test_logits_are_those_of_the_definition(positions):
    model = make(**positions)
    random = np.random.default_rng(1)
    nnx.update(
        model,
        jax.tree.map(
            lambda x: x + jnp.asarray(random.normal(size=x.shape, scale=0.2), x.dtype),
            nnx.state(model),
        ),
    )
    tokens = make_tokens()
    logits = model(tokens)
    assert logits.shape == (3, 8, 17) and logits.dtype == jnp.float32
    np.testing.assert_allclose(
        logits, reference_logits(model, tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("positions", [{}, LEARNED], ids=["rotary", "learned"])
def test_no_logit_depends_on_a_later_token(positions):
    model = make(**positions)
    tokens = make_tokens()
    before = np.asarray(model(tokens))
    after = np.asarray(model(tokens.at[:, 5].add(1)))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).all(-1).all()


def test_stacked_blocks_are_those_of_a_loop():
    model = make()
    tokens = make_tokens()
    stacked = stacked_params(model.blocks)
    x = model.embedding[...][tokens]
    for number in range(model.layers):
        layer = {name: values[number] for name, values in stacked.items()}
        x = apply_block(x, layer, turns=rotary_turns(8, 4))
    logits = rms_norm(x, model.norm[...]) @ model.embedding[...].T
    np.testing.assert_allclose(model(tokens), logits, rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_only():
    cos, sin = rotary_turns(32, 8)
    q, k = np.random.default_rng(0).normal(size=(2, 4, 2))  # as pairs of dims
    q, k = q @ [1, 1j], k @ [1, 1j]
    turn = cos + 1j * sin
    scores = [
        np.real((q * turn[a] * np.conj(k * turn[a - 3])).sum()) for a in (3, 9, 31)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)
    assert abs(np.real((q * turn[9] * np.conj(k * turn[8])).sum()) - scores[0]) > 1e-3


def test_learned_positions_end_and_rotary_ones_do_not():
    with pytest.raises(ValueError, match="longer than the 12 learned positions.*13"):
        make(**LEARNED)(make_tokens(seq=13))
    assert make(**LEARNED)(make_tokens(seq=12)).shape[1] == 12
    assert make()(make_tokens(seq=40)).shape[1] == 40


def test_the_embedding_learns_from_both_of_its_ends():
    model = make()
    tokens = jnp.full((2, 6), 3, jnp.uint8)
    total_loss, params = loss_of(model)
    grad = jax.jit(jax.grad(total_loss))(params, tokens)["embedding"][...]
    rows = np.abs(np.asarray(grad)).sum(1)
    # only row 3 is read; every row is compared with at the end
    assert (rows > 0).all() and rows[3] == rows.max()

    def split_loss(read, compared):
        x = read[tokens[:, :-1]]
        for number in range(model.layers):
            layer = {k: v[number] for k, v in stacked_params(model.blocks).items()}
            x = apply_block(x, layer, turns=rotary_turns(5, 4))
        logits = rms_norm(x, model.norm[...]) @ compared.T
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 3])

    e = model.embedding[...]
    parts = jax.jit(jax.grad(split_loss, argnums=(0, 1)))(e, e)
    assert all(np.abs(part).max() > 1e-4 for part in parts)
    np.testing.assert_allclose(grad, parts[0] + parts[1], rtol=1e-4, atol=1e-7)


@cache
def plain_gradient(batch):
    """The loss and its gradient, on one device and without remat."""
    loss, params = loss_of(make())
    return jax.jit(jax.value_and_grad(loss))(params, make_tokens(batch))


@pytest.mark.parametrize("remat", REMATS[1:])
def test_remat_changes_nothing(remat):
    loss, params = loss_of(make(remat=remat))
    found = jax.jit(jax.value_and_grad(loss))(params, make_tokens())
    expected = plain_gradient(3)
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("positions", [{}, LEARNED], ids=["rotary", "learned"])
def test_the_gradient_is_the_slope_of_the_loss(positions):
    loss, params = loss_of(make(**positions))
    tokens = make_tokens()
    grad = jax.jit(jax.grad(loss))(params, tokens)
    random = np.random.default_rng(5)
    way = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), params)
    size = 1e-3

    @jax.jit
    def at(distance):
        moved = jax.tree.map(lambda p, w: p + distance * w, params, way)
        return loss(moved, tokens)

    expected = sum(map(np.vdot, jax.tree.leaves(grad), jax.tree.leaves(way)))
    slope = (float(at(size)) - float(at(-size))) / (2 * size)
    np.testing.assert_allclose(slope, expected, rtol=2e-2)


def test_the_loss_is_the_weighted_sum_of_nats():
    model = make()
    tokens = make_tokens(seq=9)
    weights = jnp.asarray(np.random.default_rng(2).integers(0, 3, (3, 8)), jnp.float32)
    total, weight = gpt.next_token_loss(model, tokens, weights)
    chances = jax.nn.log_softmax(model(tokens[:, :-1]))
    picked = np.take_along_axis(
        np.asarray(chances), np.asarray(tokens)[:, 1:, None], -1
    )
    np.testing.assert_allclose(total, -(picked[..., 0] * weights).sum(), rtol=1e-5)
    assert float(weight) == float(weights.sum())
    assert total.dtype == weight.dtype == jnp.float32 and total.shape == ()
    nothing = gpt.next_token_loss(model, tokens, jnp.zeros((3, 8)))
    assert [float(x) for x in nothing] == [0.0, 0.0]


def test_an_untrained_model_knows_next_to_nothing():
    total, weight = gpt.next_token_loss(
        gpt.tiny(rngs=nnx.Rngs(0)), make_tokens(seq=33), jnp.ones((3, 32))
    )
    assert abs(float(total / weight) - np.log(256)) < 0.2


def test_the_parameters_choose_the_dtype_to_compute_in():
    model = make()
    tokens = make_tokens()
    exact = model(tokens)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model))
    nnx.update(model, half)
    found = model(tokens)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=0.02)
    wide = [
        str(e)
        for e in jax.make_jaxpr(model)(tokens).jaxpr.eqns
        if e.primitive.name == "scan" and "f32[3,8,64]" in str(e)
    ]
    assert wide == []  # hidden units are bfloat16


@pytest.mark.parametrize("changes", [{}, LEARNED, {"hidden": 24}, {"vocab": 300}])
def test_parameters_are_as_many_as_the_formula_says(changes):
    model = make(**changes)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(x.size for x in leaves) == model.parameter_count()
    assert not nnx.state(model, nnx.Not(nnx.Param))


def product_flops(jaxpr, times=1):
    """FLOPs of the matrix products of a jaxpr."""
    total = 0
    for e in jaxpr.eqns:
        if e.primitive.name == "dot_general":
            (contracted, _), _ = e.params["dimension_numbers"]
            shape = e.invars[0].aval.shape
            inner = np.prod([shape[d] for d in contracted])
            total += 2 * times * int(np.prod(e.outvars[0].aval.shape) * inner)
        more = (
            times * e.params.get("length", 1) if e.primitive.name == "scan" else times
        )
        for value in e.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += product_flops(inner, more)
    return total


@pytest.mark.parametrize("changes", [{}, LEARNED, {"hidden": 24, "heads": 2}])
def test_flops_are_as_many_as_the_formula_says(changes):
    model = make(**changes)
    loss, params = loss_of(model)
    tokens = make_tokens(batch=2, seq=9)
    forward = product_flops(jax.make_jaxpr(loss)(params, tokens).jaxpr)
    training = product_flops(jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr)
    assert training == 16 * model.flops_per_token(8)
    assert 3 * forward == training


@pytest.mark.parametrize("mesh_shape", ["1x1", "4x2", "2x4"])
def test_tensor_parallel_rules_fit_and_change_nothing(mesh_shape):
    mesh = make_mesh(mesh_shape)
    loss, params = loss_of(make())
    tokens = make_tokens(batch=4)
    specs = match_specs(params, TP_RULES)
    check_specs(params, specs, mesh)
    split = jax.device_put(params, named_shardings(specs, mesh))
    found = jax.jit(jax.value_and_grad(loss))(split, tokens)
    expected = plain_gradient(4)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_every_tensor_parallel_rule_names_a_leaf_of_its_own():
    params = nnx.state(make())
    paths = [leaf_path(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern, spec in TP_RULES:
        matched = [p for p in paths if pattern in p]
        assert len(matched) == 1 and spec != P()


def test_what_each_block_adds_shrinks_with_depth():
    shallow, deep = (make(layers=n, dim=64) for n in (1, 16))
    for name in ("attention_out", "mlp_out"):
        one, many = (stacked_params(m.blocks)[name].std() for m in (shallow, deep))
        np.testing.assert_allclose(one / many, 4, rtol=0.1)
    np.testing.assert_allclose(
        stacked_params(deep.blocks)["qkv"].std(), 1 / 8, rtol=0.1
    )


@pytest.mark.parametrize("preset", [gpt.tiny, gpt.small, gpt.medium, gpt.large])
def test_presets_split_over_a_model_axis(preset):
    model = nnx.eval_shape(lambda: preset(rngs=nnx.Rngs(0), remat="full"))
    assert model.heads % 4 == 0 and model.dim % 64 == 0 and model.remat == "full"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "`heads` of a GPT must divide `dim`, got 3 heads for dim 16"),
        ({"layers": 0}, "`layers` of a GPT must be positive, got 0"),
        ({"hidden": -1}, "`hidden` of a GPT must be positive, got -1"),
        ({"heads": 0}, "`heads` of a GPT must be positive, got 0"),
        ({"positions": "sines"}, "`positions` of a GPT must be .* got 'sines'"),
        ({"heads": 16}, "`dim // heads` must be even, got 1"),
        ({"seq_len": 9}, "number of learned positions, got 9 with rotary"),
        ({"positions": "learned"}, "need `seq_len`.*got None"),
        ({"remat": "some"}, "`remat` must be one of .* got 'some'"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    values = {**SIZES, **changes}
    with pytest.raises(ValueError, match=message):
        gpt.GPT(**values, rngs=nnx.Rngs(0))


def test_weights_have_to_fit_the_tokens():
    with pytest.raises(ValueError, match=r"shape \(3, 7\) for tokens \(3, 8\), got"):
        gpt.next_token_loss(make(), make_tokens(), jnp.ones((3, 8)))

"""The models against their definitions in NumPy, their contract and their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from shardjax.models import DCN, DLRM, MLP, DeepFM, LogisticRegression, WideDeep
from tests.helpers import collectives

MODELS = [LogisticRegression, WideDeep, DeepFM, DLRM, DCN]
FEATURES = ("user", "item", "site")
DIM = 4


def _make(model, features=FEATURES, n_dense=5, dim=DIM, **sizes):
    return model(features=features, n_dense=n_dense, dim=dim, rngs=nnx.Rngs(3), **sizes)


def _inputs(model, batch=6, features=FEATURES, n_dense=5, dim=DIM, seed=0):
    random = np.random.default_rng(seed)
    dense = jnp.asarray(random.normal(size=(batch, n_dense)), jnp.float32)
    width = model.row_dim(dim)
    rows: dict[str, jax.Array] = {
        name: jnp.asarray(random.normal(size=(batch, width)), jnp.float32)
        for name in features
    }
    return dense, rows


def _randomize(model, seed=7):
    """Random values for all parameters, zeros included."""
    random = np.random.default_rng(seed)
    state = jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), nnx.state(model)
    )
    nnx.update(model, state)
    return model


# NumPy float64 definitions.


def _affine(layer, x):
    bias = 0.0 if layer.bias is None else np.asarray(layer.bias[...], np.float64)
    return x @ np.asarray(layer.kernel[...], np.float64) + bias


def _mlp(mlp, x):
    for number, layer in enumerate(mlp.layers, start=1):
        x = _affine(layer, x)
        if mlp.relu_last or number < len(mlp.layers):
            x = np.maximum(x, 0)
    return x


def _linear(model, dense, rows):
    weights = np.asarray(model.linear.weights[...], np.float64)
    bias = float(model.linear.bias[...])
    return dense @ weights + sum(row[:, 0] for row in rows) + bias


def _pairs(vectors):
    n = len(vectors)
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(n) for j in range(i)]
    return np.stack(pairs, 1)


def _expected(model, dense, embeddings):
    dense = np.asarray(dense, np.float64)
    rows = [np.asarray(embeddings[name], np.float64) for name in model.features]
    match model:
        case LogisticRegression():
            return _linear(model, dense, rows)
        case WideDeep():
            deep = np.concatenate([dense, *[row[:, 1:] for row in rows]], 1)
            return _linear(model, dense, rows) + _mlp(model.deep, deep)[:, 0]
        case DeepFM():
            vectors = [row[:, 1:] for row in rows]
            logits = _linear(model, dense, rows) + _pairs(vectors).sum(1)
            if model.deep is not None:
                deep = np.concatenate([dense, *vectors], 1)
                logits = logits + _mlp(model.deep, deep)[:, 0]
            return logits
        case DLRM():
            if model.bottom is None:
                return _mlp(model.top, _pairs(rows))[:, 0]
            bottom = _mlp(model.bottom, dense)
            top = np.concatenate([bottom, _pairs([bottom, *rows])], 1)
            return _mlp(model.top, top)[:, 0]
        case DCN():
            x0 = x = np.concatenate([dense, *rows], 1)
            for number, expand in enumerate(model.expand):
                inner = _affine(model.reduce[number], x) if model.reduce else x
                x = x0 * _affine(expand, inner) + x
            return _mlp(model.deep, x)[:, 0]
        case _:
            raise TypeError(f"no definition of {type(model).__name__} here")


VARIANTS = [
    pytest.param(LogisticRegression, {}, id="lr"),
    pytest.param(WideDeep, {}, id="wide_deep"),
    pytest.param(DeepFM, {}, id="deepfm"),
    pytest.param(DeepFM, {"hidden": None}, id="fm"),
    pytest.param(DLRM, {}, id="dlrm"),
    pytest.param(DCN, {}, id="dcn"),
    pytest.param(DCN, {"rank": 2}, id="dcn-rank2"),
    pytest.param(DCN, {"cross_layers": 0}, id="dcn-mlp-only"),
]


@pytest.mark.parametrize("n_dense", [5, 0])
@pytest.mark.parametrize(("model", "sizes"), VARIANTS)
def test_logits_are_those_of_the_definition(model, sizes, n_dense):
    module = _randomize(_make(model, n_dense=n_dense, **sizes))
    dense, rows = _inputs(model, n_dense=n_dense)
    logits = module(dense, rows)
    assert logits.shape == (6,)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(
        logits, _expected(module, dense, rows), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("model", MODELS)
def test_order_of_features_is_that_of_the_constructor(model):
    module = _randomize(_make(model))
    dense, rows = _inputs(model)
    backwards = dict(reversed(rows.items()))
    np.testing.assert_array_equal(module(dense, rows), module(dense, backwards))


@pytest.mark.parametrize("model", MODELS)
def test_default_sizes_train_every_parameter(model):
    module = model(features=FEATURES, n_dense=5, dim=DIM, rngs=nnx.Rngs(3))
    dense, rows = _inputs(model, batch=64)
    labels = jnp.arange(64) % 2
    graph, params = nnx.split(module)

    @jax.jit
    def loss(params, rows):
        logits = nnx.merge(graph, params)(dense, rows)
        return jnp.mean(jnp.logaddexp(0.0, logits) - labels * logits)

    grads, row_grads = jax.grad(loss, argnums=(0, 1))(params, rows)
    for grad in jax.tree.leaves((grads, row_grads)):
        assert np.isfinite(grad).all()
        assert np.abs(grad).max() > 0
    step = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
    assert loss(step, rows) < loss(params, rows)


@pytest.mark.parametrize("model", MODELS)
def test_same_seed_makes_the_same_weights(model):
    first, second = (nnx.state(_make(model)) for _ in range(2))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, second))


@pytest.mark.parametrize("model", MODELS)
def test_empty_batch_gives_no_logits(model):
    assert _make(model)(*_inputs(model, batch=0)).shape == (0,)


@pytest.mark.parametrize("model", MODELS)
def test_rows_have_the_width_that_row_dim_says(model):
    linear = {LogisticRegression: 1, WideDeep: 17, DeepFM: 17, DLRM: 16, DCN: 16}
    assert model.row_dim(16) == linear[model]


@pytest.mark.parametrize("model", [LogisticRegression, WideDeep, DeepFM])
def test_column_0_of_a_row_is_its_linear_weight(model):
    module = _make(model)
    dense, rows = _inputs(model)
    raised = rows | {"item": rows["item"].at[:, 0].add(2.5)}
    np.testing.assert_allclose(
        module(dense, raised), module(dense, rows) + 2.5, rtol=1e-5, atol=1e-5
    )


def test_dense_features_alone_are_enough_for_lr():
    module = _randomize(_make(LogisticRegression, features=()))
    dense, rows = _inputs(LogisticRegression, features=())
    np.testing.assert_allclose(
        module(dense, rows), _expected(module, dense, rows), rtol=1e-5
    )


def test_batch_split_over_the_mesh_gives_the_same_and_only_reduces_gradients(mesh):
    module = _make(DLRM)
    graph, params = nnx.split(module)
    dense, rows = _inputs(DLRM, batch=16)

    def loss(params, dense, rows):
        return jnp.sum(jnp.square(nnx.merge(graph, params)(dense, rows)))

    step = jax.jit(jax.value_and_grad(loss))
    expected = step(params, dense, rows)
    batch = NamedSharding(mesh, P(("data", "model")))
    placed = (
        jax.device_put(params, NamedSharding(mesh, P())),
        *jax.device_put((dense, rows), batch),
    )
    as_users = {"xla_cpu_use_fusion_emitters": True}
    compiled = step.lower(*placed).compile(as_users)
    assert set(collectives(compiled)) == (set() if mesh.size == 1 else {"all-reduce"})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        step(*placed),
        expected,
    )


def test_mlp_without_layers_is_the_identity():
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(MLP(3, (), rngs=nnx.Rngs(0))(x), x)


# Errors. The run-time check of shapes would answer first; users do not run it.


@pytest.fixture
def unchecked():
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


class _Sequence:
    """Stands for a padded sequence: any feature that is not one array."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("unchecked")
def test_inputs_that_do_not_fit_are_refused_by_name(model):
    name = model.__name__
    module = _make(model)
    dense, rows = _inputs(model)
    width = model.row_dim(DIM)

    missing = {key: value for key, value in rows.items() if key != "item"}
    with pytest.raises(ValueError, match=rf"{name} must have .*missing \['item'\]"):
        module(dense, missing)
    with pytest.raises(ValueError, match=rf"{name} must have .*unknown \['age'\]"):
        module(dense, rows | {"age": rows["user"]})
    with pytest.raises(TypeError, match=f"'site' of {name} must be pooled.*_Sequence"):
        module(dense, rows | {"site": _Sequence()})
    with pytest.raises(
        ValueError, match=rf"'user' of {name} must have shape \[6, {width}\].*\(6, 9\)"
    ):
        module(dense, rows | {"user": jnp.ones((6, 9))})
    with pytest.raises(ValueError, match=rf"'user' of {name} .*got \(5, {width}\)"):
        module(dense, rows | {"user": jnp.ones((5, width))})
    with pytest.raises(
        ValueError, match=rf"`dense` of {name} .*\[batch, 5\].*\(6, 2\)"
    ):
        module(dense[:, :2], rows)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("unchecked")
def test_arguments_that_do_not_fit_are_refused(model):
    name = model.__name__
    with pytest.raises(TypeError, match=f"`features` of {name} .* the string 'user'"):
        _make(model, features="user")
    with pytest.raises(ValueError, match=rf"`features` of {name} .*\['user'\]"):
        _make(model, features=("user", "item", "user"))
    with pytest.raises(ValueError, match=f"`n_dense` of {name} .* got -1"):
        _make(model, n_dense=-1)
    with pytest.raises(ValueError, match=f"`dim` of {name} must be positive, got 0"):
        _make(model, dim=0)
    with pytest.raises(ValueError, match=f"{name} must have an input"):
        _make(model, features=(), n_dense=0)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match="widths of an MLP must be positive, got 3 -> "
    ):
        MLP(3, (4, 0), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="DLRM must have at least two vectors .* 1 feat"
    ):
        _make(DLRM, features=("user",), n_dense=0)
    with pytest.raises(ValueError, match="`cross_layers` of DCN .* got -1"):
        _make(DCN, cross_layers=-1)
    with pytest.raises(ValueError, match="`rank` of DCN must be positive, got 0"):
        _make(DCN, rank=0)

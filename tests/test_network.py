import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from shardjax.embed import EmbeddingCollection, FeatureSpec, TableSpec
from shardjax.mesh import make_mesh
from shardjax.network import Network, as_network, flax_rules, from_linen, from_nnx
from shardjax.zero import plan_zero

DENSE = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, dense, embeddings):
        return self.out(self.dropout(self.norm(dense)))[:, 0]


class LinenModel(linen.Module):
    dropout: float = 0.0
    norm: bool = False

    @linen.compact
    def __call__(self, dense, embeddings, train=False):
        if self.norm:
            dense = linen.BatchNorm(use_running_average=not train)(dense)
        dense = linen.Dropout(self.dropout, deterministic=not train)(dense)
        return linen.Dense(1)(dense)[:, 0]


def linen_network(model, **more) -> Network:
    variables = model.init(jax.random.key(0), DENSE, {})
    return from_linen(model, variables, "train", **more)


def run(network, state=None, *, train=True):
    state = network.state if state is None else state
    return network.apply(network.params, state, DENSE, {}, train=train)


def test_nnx_parameters_and_state_are_told_apart():
    network = from_nnx(NnxModel(nnx.Rngs(0)))
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(network.params))
    assert shapes == {
        "norm": {"bias": (3,), "scale": (3,)},
        "out": {"bias": (1,), "kernel": (3, 1)},
    }
    state = nnx.to_pure_dict(network.state)
    assert state["norm"].keys() == {"mean", "var"}
    assert state["dropout"]["rngs"].keys() == {"count", "key"}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_nnx_module_is_not_changed(mode):
    module = NnxModel(nnx.Rngs(0))
    getattr(module, mode)()
    flags = (module.dropout.deterministic, module.norm.use_running_average)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    network = from_nnx(module)
    for train in (True, False):
        run(network, train=train)
    assert (module.dropout.deterministic, module.norm.use_running_average) == flags
    assert int(module.dropout.rngs.count[...]) == 0
    after = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    np.testing.assert_array_equal(module.norm.mean[...], 0)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_training_moves_the_state_and_evaluation_does_not(kind):
    if kind == "nnx":
        network = from_nnx(NnxModel(nnx.Rngs(0)))
    else:
        model = LinenModel(dropout=0.5, norm=True)
        network = linen_network(model, rngs={"dropout": jax.random.key(1)})
    first, state = run(network)
    again, _ = run(network)
    second, later = run(network, state)
    np.testing.assert_array_equal(first, again)  # pure
    assert (first != second).any()  # other dropout masks
    assert jax.tree.structure(state) == jax.tree.structure(network.state)
    assert jax.tree.structure(later) == jax.tree.structure(state)
    evaluated, same = run(network, state, train=False)
    np.testing.assert_array_equal(evaluated, run(network, state, train=False)[0])
    jax.tree.map(np.testing.assert_array_equal, _numbers(same), _numbers(state))


def _numbers(state):
    def number(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(number, state)


def test_nnx_evaluation_reads_the_moved_statistics():
    network = from_nnx(NnxModel(nnx.Rngs(0)))
    _, state = run(network)
    mean = nnx.to_pure_dict(state)["norm"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * DENSE.mean(0), rtol=1e-5)
    before, _ = run(network, train=False)
    after, _ = run(network, state, train=False)
    assert (before != after).any()


def test_linen_without_state():
    network = linen_network(LinenModel())
    assert jax.tree.leaves(network.state) == []
    logits, state = run(network)
    kernel = network.params["Dense_0"]["kernel"]
    np.testing.assert_allclose(logits, (DENSE @ kernel)[:, 0], rtol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(network.state)


def test_linen_without_a_train_argument():
    class Plain(linen.Module):
        @linen.compact
        def __call__(self, dense, embeddings):
            return linen.Dense(1)(dense)[:, 0]

    model = Plain()
    network = from_linen(model, model.init(jax.random.key(0), DENSE, {}))
    for train in (True, False):
        assert run(network, train=train)[0].shape == (6,)


def test_linen_metadata_is_unboxed():
    class Boxed(linen.Module):
        @linen.compact
        def __call__(self, dense, embeddings):
            init = linen.with_partitioning(linen.initializers.ones, (None, "model"))
            steps = self.variable(
                "steps", "count", lambda: linen.Partitioned(jnp.zeros(()), ())
            )
            if not self.is_initializing():
                steps.value = steps.value + 1  # pyright: ignore[reportOperatorIssue]
            return linen.Dense(1, kernel_init=init)(dense)[:, 0]

    model = Boxed()
    network = from_linen(model, model.init(jax.random.key(0), DENSE, {}))
    assert isinstance(network.params["Dense_0"]["kernel"], jax.Array)
    assert isinstance(jax.tree.leaves(network.state)[0], jax.Array)
    _, state = run(network)
    assert [float(x) for x in jax.tree.leaves(state)] == [1.0]


def test_variables_without_params_are_refused():
    message = r"`variables` must have the collection 'params', got \['batch_stats'\]"
    with pytest.raises(ValueError, match=message):
        from_linen(LinenModel(), {"batch_stats": {}})


def test_old_keys_are_refused():
    with pytest.raises(
        TypeError, match="the key 'dropout' of `rngs` must be one of jax.r"
    ):
        linen_network(LinenModel(), rngs={"dropout": jax.random.PRNGKey(0)})


def test_as_network():
    network = from_nnx(NnxModel(nnx.Rngs(0)))
    assert as_network(network) is network
    made = as_network(NnxModel(nnx.Rngs(0)))
    np.testing.assert_array_equal(run(made)[0], run(network)[0])
    with pytest.raises(
        TypeError, match="must be an nnx.Module or a Network, got <func"
    ):
        as_network(lambda dense, embeddings: dense)
    hint = r"got LinenModel\([^$]* Wrap a linen module: from_linen\(module, module.init"
    with pytest.raises(TypeError, match=hint):
        as_network(LinenModel())


def test_a_linen_module_is_initialized_with_example_embeddings():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, dense, embeddings):
            items, history = embeddings["item"], embeddings["history"]
            mean = jnp.where(history.mask[..., None], history.values, 0).sum(1)
            return linen.Dense(1)(jnp.concatenate([dense, items, mean], 1))[:, 0]

    table = TableSpec("item", dim=4)
    features = {
        "item": FeatureSpec(table),
        "history": FeatureSpec(table, combiner="none", max_length=5),
    }
    collection = EmbeddingCollection(features, mesh=make_mesh("1x1"))
    embeddings = collection.example_embeddings(6)
    assert embeddings["history"].values.shape == (6, 5, 4)
    assert embeddings["history"].mask.shape == (6, 5)
    model = Model()
    network = from_linen(model, model.init(jax.random.key(0), DENSE, embeddings))
    assert network.params["Dense_0"]["kernel"].shape == (3 + 4 + 4, 1)
    logits, _ = network.apply(
        network.params, network.state, DENSE, embeddings, train=True
    )
    assert logits.shape == (6,)


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, (None, "hidden"))
        down = nnx.with_partitioning(init, ("hidden", "embed"))
        self.up = nnx.Linear(4, 16, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(16, 4, kernel_init=down, rngs=rngs)


def annotated():
    with nnx.use_eager_sharding(False):
        return nnx.state(Annotated(nnx.Rngs(0)), nnx.Param)


def test_rules_are_read_from_nnx():
    params = annotated()
    rules = flax_rules(params, {"hidden": "model", "embed": None})
    assert rules == [
        ("^down/kernel(/|$)", jax.P("model", None)),
        ("^up/kernel(/|$)", jax.P(None, "model")),
    ]
    plan = plan_zero(params, optax.sgd(0.1), make_mesh("4x2"), 3, rules, min_bytes=0)
    specs = {leaf.path.removesuffix("/value"): leaf.spec for leaf in plan.leaves}
    assert specs["up/kernel"] == jax.P("data", "model")
    assert specs["down/kernel"] == jax.P("model", "data")
    assert specs["up/bias"] == jax.P("data")


def test_rules_are_read_from_linen_boxes():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
    module = linen.Dense(8, kernel_init=init)
    params = module.init(jax.random.key(0), jnp.ones((2, 4)))["params"]
    assert flax_rules(params) == [("^kernel(/|$)", jax.P(None, "model"))]
    unboxed = linen.meta.unbox(params)
    plan = plan_zero(
        unboxed, optax.sgd(0.1), make_mesh("4x2"), 1, flax_rules(params), min_bytes=0
    )
    assert plan.param_specs["kernel"] == jax.P(None, "model")


def test_a_name_without_an_axis_is_an_error():
    with pytest.raises(
        ValueError, match=r"annotated with 'embed', .* it has \['hidden'\]"
    ):
        flax_rules(annotated(), {"hidden": "model"})
    with pytest.raises(ValueError, match="names the axis 'hidden'"):
        plan_zero(
            annotated(), optax.sgd(0.1), make_mesh("4x2"), 1, flax_rules(annotated())
        )

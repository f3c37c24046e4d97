import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax.embed import EmbeddingCollection, FeatureSpec, TableSpec
from shardjax.mesh import make_mesh
from shardjax.metrics import AUC, Accuracy, Mean
from shardjax.network import Network
from shardjax.state import compute_metrics, init_state, stack_metrics


def make_state(mesh, **more):
    table = TableSpec("item", 4, optax.adam(0.1))
    collection = EmbeddingCollection({"x": FeatureSpec(table)}, mesh=mesh)
    params = {"w": np.arange(3, dtype=np.float32)}
    state = {"seen": jnp.zeros([], jnp.int32), "key": jax.random.key(7)}
    network = Network(lambda *a, **k: None, params, state)
    return network, init_state(network, optax.adam(0.1), collection, **more)


def test_every_leaf_is_on_the_whole_mesh(mesh):
    network, state = make_state(mesh, metrics={"auc": AUC()})
    over_all = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    for part in (state.step, state.params, state.model_state, state.opt_state):
        for leaf in jax.tree.leaves(part):
            assert leaf.sharding.is_fully_replicated
            assert leaf.sharding.device_set == set(mesh.devices.flat)
    for leaf in jax.tree.leaves(state.metrics):
        assert leaf.sharding.is_equivalent_to(over_all, leaf.ndim)
        assert leaf.shape[0] == mesh.size
    (slab,) = state.tables
    for leaf in (slab.rows, *slab.row_state):
        assert leaf.sharding.is_equivalent_to(over_all, leaf.ndim)
        assert leaf.shape == (mesh.size * 1024, 4)
        assert not leaf.any()
    assert [s.shape for s in slab.shared] == [()]
    assert int(state.step) == 0
    np.testing.assert_array_equal(state.params["w"], network.params["w"])
    np.testing.assert_array_equal(state.opt_state[0].mu["w"], 0)


def test_the_network_keeps_its_arrays():
    params = {"w": jnp.arange(3.0)}
    table = TableSpec("item", 4)
    collection = EmbeddingCollection({"x": FeatureSpec(table)}, mesh=make_mesh("1x1"))
    network = Network(lambda *a, **k: None, params, {"key": jax.random.key(7)})
    state = init_state(network, optax.sgd(0.1), collection)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    np.testing.assert_array_equal(params["w"], [0, 1, 2])
    assert jax.random.key_data(network.state["key"])[1] == 7


def test_replace_changes_some_fields():
    _, state = make_state(make_mesh("1x1"))
    other = state.replace(step=jnp.int32(5))
    assert int(other.step) == 5
    assert other.params is state.params
    with pytest.raises(AttributeError):
        state.step = other.step


def test_metrics_are_merged_over_devices(mesh):
    rng = np.random.default_rng(0)
    n = mesh.size * 5
    columns = {
        "labels": rng.integers(0, 2, n).astype(np.float32),
        "predictions": rng.uniform(size=n).astype(np.float32),
        "weights": rng.integers(0, 3, n).astype(np.float32),
    }
    metrics = {"accuracy": Accuracy(), "mean": Mean("predictions"), "auc": AUC()}
    expected = {k: m.update(**columns).compute() for k, m in metrics.items()}
    stacked = stack_metrics(metrics, mesh)
    by_device = {k: v.reshape(mesh.size, 5) for k, v in columns.items()}
    stacked = {
        k: jax.vmap(lambda m, c: m.update(**c))(m, by_device)
        for k, m in stacked.items()
    }
    got = compute_metrics(stacked)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert isinstance(value, float)
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)


def test_empty_metrics_are_nan(mesh):
    assert np.isnan(compute_metrics(stack_metrics({"auc": AUC()}, mesh))["auc"])
    assert compute_metrics(stack_metrics({}, mesh)) == {}

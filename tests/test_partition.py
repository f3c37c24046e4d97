"""Rules from leaf paths to specs, and what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from shardjax.mesh import make_mesh
from shardjax.partition import check_specs, match_specs, named_shardings, spec_problems


def _params():
    return {
        "bottom": [{"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}],
        "top": {"kernel": jnp.ones((8, 24)), "bias": jnp.ones(24)},
        "step": jnp.int32(3),
    }


def test_first_matching_rule_wins_and_the_rest_is_default():
    rules = [("top/kernel", P("data")), ("kernel$", P(None, "model"))]
    assert match_specs(_params(), rules) == {
        "bottom": [{"kernel": P(None, "model"), "bias": P()}],
        "top": {"kernel": P("data"), "bias": P()},
        "step": P(),
    }
    assert match_specs(_params(), [], default=P("data"))["step"] == P("data")


def test_pattern_is_searched_for_anywhere_and_can_be_anchored():
    tree = {"kernel": 1, "kernel_scale": 2}
    assert match_specs(tree, [("ern", P("data"))])["kernel_scale"] == P("data")
    assert match_specs(tree, [("^kernel$", P("data"))])["kernel_scale"] == P()


def test_rules_reach_nnx_parameters_and_their_optimizer_state():
    state = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    rules = [("kernel", P(None, "model"))]
    specs = match_specs(state, rules)
    assert specs["kernel"].get_value() == P(None, "model")
    assert specs["bias"].get_value() == P()
    adam = match_specs(optax.adam(1e-3).init({"kernel": jnp.ones((4, 8))}), rules)
    assert adam[0].mu == adam[0].nu == {"kernel": P(None, "model")}
    assert adam[0].count == P()


def test_arrays_land_as_the_specs_say(mesh):
    params = _params()
    specs = match_specs(params, [("kernel", P(("data", "model")))])
    check_specs(params, specs, mesh)
    shardings = named_shardings(specs, mesh)
    placed = jax.device_put(params, shardings)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    kernel = placed["bottom"][0]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16 // mesh.size, 8)
    np.testing.assert_array_equal(kernel, params["bottom"][0]["kernel"])


def test_every_leaf_that_does_not_fit_is_reported_with_both_numbers():
    params = _params()
    specs = match_specs(
        params,
        [
            ("bottom/0/kernel", P(None, ("data", "model"))),
            ("bottom/0/bias", P("rows")),
            ("top/kernel", P("data", "data")),
            ("top/bias", P(("data", "model"))),
            ("step", P("data")),
        ],
    )
    assert sorted(spec_problems(params, specs, make_mesh("4x1"))) == [
        "bottom/0/bias: P('rows',) names the axis 'rows'",
        "step: P('data',) has 1 entry for shape () of 0 dims",
        "top/kernel: P('data', 'data') names the axis 'data' twice",
    ]
    mesh = make_mesh("3x2")
    with pytest.raises(ValueError, match=r"fit .* mesh \(data=3, model=2\)") as error:
        check_specs(params, specs, mesh)
    text = str(error.value)
    for problem in spec_problems(params, specs, mesh):
        assert f"\n  - {problem}\n" in text
    assert (
        "bottom/0/kernel: dim 1 of shape (16, 8) is 8, not divisible by 6 (dataxmodel)"
    ) in text
    assert "top/bias" not in text
    assert "Pad the dim" in text


def test_shapes_alone_can_be_checked():
    shapes = jax.eval_shape(_params)
    specs = match_specs(shapes, [("top", P("data"))])
    assert len(spec_problems(shapes, specs, make_mesh("5x1"))) == 2
    assert spec_problems(shapes, specs, make_mesh("8x1")) == []


def test_unconstrained_and_empty_dims_fit():
    tree = {"a": jnp.ones((0, 3))}
    specs = {"a": P("data", P.UNCONSTRAINED)}
    assert spec_problems(tree, specs, make_mesh("8x1")) == []


def test_named_shardings_refuse_unknown_axes():
    with pytest.raises(ValueError, match=r"a/b: P\('rows',\) names the axis 'rows'"):
        named_shardings({"a": {"b": P("rows")}}, make_mesh("8x1"))


def test_bad_rules_are_refused():
    with pytest.raises(
        TypeError, match="rule 'w' must give a PartitionSpec, got tuple"
    ):
        match_specs({"w": 1}, [("w", ("data",))])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="`default` must give a PartitionSpec, got str"):
        match_specs({"w": 1}, [], default="data")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"pattern '\(w' of `rules` must be a regular expression"
    ):
        match_specs({"w": 1}, [("(w", P())])
    with pytest.raises(TypeError, match="`rules` must be a sequence, got the dict"):
        match_specs({"w": 1}, {"w": P()})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="must be a pair of a pattern and a Part"):
        match_specs({"w": 1}, ["w"])  # pyright: ignore[reportArgumentType]

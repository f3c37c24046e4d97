"""What a plan says, and what it refuses."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardjax as sj
from shardjax import zero
from tests.zero.small import RULES, plan_small, small_params

ADAM = optax.adam(1e-3)


def leaf_of(plan, path):
    [leaf] = [leaf for leaf in plan.leaves if leaf.path == path]
    return leaf


def shapes(**sizes):
    return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in sizes.items()}


@pytest.mark.parametrize(
    ("stage", "between", "updated"),
    [
        (0, P(), P()),
        (1, P(), P("data")),
        (2, P(), P("data")),
        (3, P("data"), P("data")),
    ],
)
def test_stages(stage, between, updated):
    plan = zero.plan_zero(
        shapes(w=(16, 8)), ADAM, sj.make_mesh("8x1"), stage, min_bytes=0
    )
    leaf = leaf_of(plan, "w")
    assert (leaf.spec, leaf.split_spec) == (between, updated)
    assert plan.opt_specs[0].mu["w"] == updated
    assert plan.opt_specs[0].count == P()


@pytest.mark.parametrize(
    ("shape", "dim", "reason"),
    [
        ((8, 16), 1, "dim 1 of 16, the largest that 8 divides"),
        ((16, 16), 0, "dim 0 of 16, the largest that 8 divides"),
        ((24, 30), 0, "dim 0 of 24, the largest that 8 divides"),
        (
            (32001, 7),
            None,
            r"whole: 8 \(data\) divides none of its free dims \[32001, 7\]",
        ),
        ((), None, "whole: 4 bytes, less than min_bytes 16"),
        ((0, 8), None, "whole: 0 bytes"),
    ],
)
def test_the_dim_that_is_split(shape, dim, reason):
    plan = zero.plan_zero(shapes(w=shape), ADAM, sj.make_mesh("8x1"), 1, min_bytes=16)
    leaf = leaf_of(plan, "w")
    found = None if leaf.part is None or leaf.part.dim is None else leaf.part.dim
    assert (None if found is None else found + len(shape)) == dim
    assert re.match(reason, leaf.reason)


def test_the_leading_dim_of_blocks_is_the_layers():
    plan = zero.plan_zero(
        shapes(a=(64, 8), b=(64, 8)),
        ADAM,
        sj.make_mesh("8x1"),
        3,
        blocks=["^a"],
        min_bytes=0,
    )
    assert leaf_of(plan, "a").spec == P(None, "data")
    assert leaf_of(plan, "b").spec == P("data")
    assert leaf_of(plan, "a").in_block
    assert not leaf_of(plan, "b").in_block


def test_tensor_parallelism_keeps_its_dim():
    plan = plan_small("4x2", 3, ADAM, RULES)
    assert plan.param_specs["blocks"]["w1"] == P(None, "data", "model")
    assert plan.param_specs["blocks"]["w2"] == P(None, "model", "data")
    assert plan.param_specs["embedding"] == P("model", "data")
    assert plan.opt_specs[0].nu["blocks"]["w1"] == P(None, "data", "model")
    assert plan.auto_axes == ("model",)


def test_all_axes_may_be_of_data_parallelism():
    plan = zero.plan_zero(
        shapes(w=(16, 3)),
        ADAM,
        sj.make_mesh("4x2"),
        3,
        axes=("data", "model"),
        min_bytes=0,
    )
    assert plan.param_specs["w"] == P(("data", "model"))
    assert plan.parts == 8


def test_factored_state_keeps_the_entries_of_its_dims():
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    plan = zero.plan_zero(shapes(w=(32, 16)), tx, sj.make_mesh("8x1"), 2, min_bytes=0)
    factored = [
        (x.shape, spec)
        for x, spec in zip(
            jax.tree.leaves(plan.abstract_opt_state),
            jax.tree.leaves(plan.opt_specs, is_leaf=lambda x: isinstance(x, P)),
            strict=True,
        )
    ]
    assert ((32,), P("data")) in factored
    assert ((16,), P()) in factored


def test_optimizers_for_some_leaves_only():
    tx = optax.multi_transform(
        {"adam": ADAM, "none": optax.set_to_zero()}, {"a": "adam", "b": "none"}
    )
    plan = zero.plan_zero(
        shapes(a=(8, 2), b=(8, 2)), tx, sj.make_mesh("8x1"), 2, min_bytes=0
    )
    specs = jax.tree.leaves(plan.opt_specs, is_leaf=lambda x: isinstance(x, P))
    assert specs.count(P("data")) == 2  # mu and nu of a


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 5}, r"`stage` must be one of \(0, 1, 2, 3\), got 5"),
        ({"stage": True}, r"`stage` must be one of .* got True"),
        ({"min_bytes": -1}, "`min_bytes` must be 0 or more bytes, got -1"),
        ({"min_bytes": "4k"}, "`min_bytes` must be 0 or more bytes, got '4k'"),
        ({"tolerance": "no"}, r"`tolerance` must be in \[0, 1\] or None, got 'no'"),
        ({"tolerance": 2.0}, r"`tolerance` must be in \[0, 1\] or None, got 2.0"),
        ({"axes": ("rows",)}, r"`axes` must name axes of the mesh, .* got \('rows',\)"),
        ({"axes": ()}, r"`axes` must name axes of the mesh"),
        (
            {"rules": [("nothing", P())]},
            "pattern 'nothing' of `rules` matches no parameter",
        ),
        ({"blocks": ["layer"]}, "pattern 'layer' of `blocks` matches no parameter"),
        ({"blocks": ["(w"]}, r"pattern '\(w' of `blocks` must be a regular expression"),
        ({"rules": [("w1", P("model", "model"))]}, "names the axis 'model' twice"),
        ({"rules": [("w1", P("model"))]}, "is 3, not divisible by 2"),
        (
            {"rules": [("w1", P(None, ("data", "model")))]},
            "must name all of the data par",
        ),
        ({"precision": "fp8"}, r"`precision` must be one of \['f32', 'bf16', 'f16'\]"),
    ],
)
def test_bad_plans_are_refused(options, message):
    options = {"stage": 1, "rules": ()} | options
    with pytest.raises(ValueError, match=message):
        zero.plan_zero(small_params(), ADAM, sj.make_mesh("4x2"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": "^blocks/"}, r"`blocks` must be a seq.* Give \('\^blocks/',\)"),
        ({"axes": "data"}, r"`axes` must be a sequence, .* Give \('data',\)"),
        ({"rules": {"w1": P()}}, "`rules` must be a sequence, got the dict"),
        ({"rules": ["w1"]}, "each of `rules` must be a pair"),
    ],
)
def test_a_string_is_no_sequence_of_patterns(options, message):
    with pytest.raises(TypeError, match=message):
        zero.plan_zero(small_params(), ADAM, sj.make_mesh("4x2"), 3, **options)


def test_too_much_left_whole_is_refused_where_asked():
    params = shapes(a=(64, 8), odd=(63, 9))
    mesh = sj.make_mesh("8x1")
    zero.plan_zero(params, ADAM, mesh, 1, min_bytes=0)
    with pytest.raises(
        ValueError, match=r"(?s)may stay whole, but 52.5% do:.*odd \(63, 9\)"
    ):
        zero.plan_zero(params, ADAM, mesh, 1, min_bytes=0, tolerance=0.02)
    zero.plan_zero(params, ADAM, mesh, 0, min_bytes=0, tolerance=0.02)
    zero.plan_zero(params, ADAM, sj.make_mesh("1x8"), 1, min_bytes=0, tolerance=0.02)


def test_a_users_mesh_with_explicit_axes_is_made_auto():
    explicit = jax.make_mesh((8, 1), ("data", "model"))
    plan = zero.plan_zero(shapes(w=(8, 2)), ADAM, explicit, 1, min_bytes=0)
    assert set(plan.mesh.axis_types) == {jax.sharding.AxisType.Auto}

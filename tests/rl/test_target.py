"""Targets follow their rule, own their arrays and lie where the parameters do."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardjax as sj
from shardjax import rl


def bits(tree):
    """The leaves as bytes; NaN equals itself."""
    raw = jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        ),
        tree,
    )
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(raw)]


def pointers(tree):
    return {
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        for shard in x.addressable_shards
    }


def make_params(dtype=jnp.float32):
    """Parameters in parts and whole, a counter and a key, on 8 devices."""
    mesh = sj.make_mesh("8x1")
    split, whole = (jax.NamedSharding(mesh, jax.P(*a)) for a in (("data",), ()))
    return {
        "w": jax.device_put(jnp.arange(64, dtype=dtype).reshape(16, 4), split),
        "b": jax.device_put(jnp.ones(3, dtype), whole),
        "seen": jax.device_put(jnp.int32(7), whole),
        "key": jax.device_put(jax.random.key(3), whole),
    }


def moved(params, seed=1):
    """Parameters of a later step, where they lay."""

    def move(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(seed), x.sharding)
        return jax.device_put(x + jnp.asarray(seed, x.dtype), x.sharding)

    return jax.tree.map(move, params)


@pytest.mark.parametrize("rule", [rl.HardCopy(2), rl.Polyak(0.1)], ids=str)
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_target_begins_as_a_copy_in_arrays_of_its_own(rule, where):
    params = make_params(jnp.bfloat16)
    init = partial(rl.init_target, rule=rule)
    target = (jax.jit(init) if where == "inside" else init)(params)
    assert not pointers(params) & pointers(target)
    assert bits(rl.as_params(target, params)) == bits(params)
    wide = jnp.float32 if isinstance(rule, rl.Polyak) else jnp.bfloat16
    assert target["w"].dtype == target["b"].dtype == wide
    assert target["seen"].dtype == jnp.int32
    if where == "outside":
        for x, like in zip(
            jax.tree.leaves(target), jax.tree.leaves(params), strict=True
        ):
            assert x.sharding == like.sharding


def test_numpy_parameters_and_those_of_nnx_are_copied():
    given = np.ones(3, np.float32)
    target = rl.init_target({"w": given}, rl.HardCopy(1))
    given[:] = 5
    assert target["w"].tolist() == [1, 1, 1]
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    # nnx.clone shares the buffers, and to donate both ends in an error (flax #5461)
    target = rl.init_target(params, rl.HardCopy(1))
    assert not pointers(params) & pointers(target)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, target):
        params = jax.tree.map(lambda p: 2 * p, params)
        return params, rl.apply_target(rl.HardCopy(1), params, target, 1)

    for _ in range(3):
        params, target = step(params, target)
    assert bits(params) == bits(target)
    assert not pointers(params) & pointers(target)


@pytest.fixture(scope="module")
def hard_inside():
    rule = rl.HardCopy(3)

    @partial(jax.jit, donate_argnums=1)
    def apply(params, target, step):
        return rl.apply_target(rule, params, target, step)

    return apply


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_hard_copy_is_the_parameters_of_the_last_step_that_is_due(hard_inside, where):
    outside = rl.make_target_step(rl.HardCopy(3))
    apply = hard_inside if where == "inside" else outside
    params = make_params()
    target, wanted = rl.init_target(params, rl.HardCopy(3)), params
    for step in range(1, 8):
        params = moved(params, step)
        target = apply(params, target, step)
        wanted = params if step % 3 == 0 else wanted
        assert bits(target) == bits(wanted), step
        assert not pointers(params) & pointers(target)
        for x, like in zip(
            jax.tree.leaves(target), jax.tree.leaves(params), strict=True
        ):
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_the_old_target_does_not_survive(hard_inside, where, bad):
    apply = hard_inside if where == "inside" else rl.make_target_step(rl.HardCopy(3))
    params = make_params()
    target = rl.init_target(params, rl.HardCopy(3))
    target["w"] = jnp.full_like(target["w"], bad)
    assert bits(apply(params, target, 6)) == bits(params)


def test_outside_a_copy_takes_the_memory_of_the_old_target_and_leaves_the_parameters():
    params = make_params()
    target = rl.init_target(params, rl.HardCopy(1))
    new = moved(params)
    there = pointers(target)
    copied = rl.make_target_step(rl.HardCopy(1))(new, target, 1)
    assert pointers(copied) == there
    assert target["w"].is_deleted() and not new["w"].is_deleted()
    assert bits(copied) == bits(new)


def test_outside_a_target_may_lie_otherwise_than_the_parameters():
    params = make_params()
    target = rl.init_target(params, rl.HardCopy(1))
    whole = jax.NamedSharding(sj.make_mesh("8x1"), jax.P())
    target["w"] = jax.device_put(target["w"], whole)
    copied = rl.make_target_step(rl.HardCopy(1))(moved(params), target, 1)
    assert copied["w"].sharding.is_equivalent_to(whole, 2)


def test_polyak_in_bfloat16_arrives_where_an_average_in_bfloat16_stands_still():
    rule = rl.Polyak(0.005)
    params = {"w": jnp.full(4, 1, jnp.bfloat16), "seen": jnp.int32(9)}
    start = {"w": jnp.full(4, 0.5, jnp.bfloat16), "seen": jnp.int32(0)}

    @jax.jit
    def run(params, target):
        def body(target, _):
            return rl.apply_target(rule, params, target, 0), None

        return jax.lax.scan(body, target, length=2000)[0]

    target = run(params, rl.init_target(start, rule))
    wanted = 1 - 0.5 * (1 - 0.005) ** 2000
    np.testing.assert_allclose(target["w"], wanted, rtol=1e-5)
    assert target["seen"] == 9


def test_polyak_moves_by_its_share_and_copies_what_is_no_float():
    rule = rl.Polyak(0.25)
    params = make_params()
    target = rl.init_target(params, rule)
    wanted = np.asarray(target["w"], np.float64)
    move = rl.make_target_step(rule)
    for step in range(1, 4):
        params = moved(params, step)
        wanted = 0.75 * wanted + 0.25 * np.asarray(params["w"], np.float64)
        target = move(params, target, step)
    np.testing.assert_allclose(target["w"], wanted, rtol=1e-6)
    assert bits({k: target[k] for k in ("seen", "key")}) == bits(
        {k: params[k] for k in ("seen", "key")}
    )
    assert target["w"].sharding == params["w"].sharding


def test_no_copy_of_the_target_outside_of_the_branch_that_makes_it():
    params = {"w": jnp.zeros((64, 1024))}
    target = rl.init_target(params, rl.HardCopy(10))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, target, step):
        params = jax.tree.map(lambda p: p * 0.9, params)
        return params, rl.apply_target(rl.HardCopy(10), params, target, step)

    text = step.lower(params, target, 1).compile().as_text()
    entry = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", text, re.S | re.M)[1]
    assert "conditional(" in entry
    assert not re.search(r"f32\[64,1024\]\S* copy\(", entry), entry


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rl.HardCopy(0), ValueError, "`every` must be at least 1 step, got 0"),
        (lambda: rl.HardCopy(2.5), TypeError, "number of steps, got 2.5. Give an int"),
        (lambda: rl.HardCopy(True), TypeError, "number of steps, got True"),
        (lambda: rl.Polyak(0), ValueError, r"`tau` must be in \(0, 1\), got 0$"),
        (lambda: rl.Polyak(1), ValueError, r"got 1. A target .* is HardCopy\(1\)"),
        (lambda: rl.Polyak(float("nan")), ValueError, "got nan"),
        (lambda: rl.make_target_step(10), TypeError, "HardCopy.*or Polyak.*, got 10"),
        (lambda: rl.init_target({}, "hard"), TypeError, "got 'hard'"),
    ],
)
def test_wrong_rules_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_wrong_targets_are_refused():
    rule = rl.Polyak(0.1)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match="must have the structure of the parameters"):
        rl.apply_target(rule, params, {"v": jnp.ones(2)}, 1)
    with pytest.raises(ValueError, match=r"w: float32\[2\], got bfloat16\[2\]"):
        rl.apply_target(rule, params, params, 1)
    step = rl.make_target_step(rl.HardCopy(1))
    with pytest.raises(ValueError, match="arrays of its own.*but w is the parameters'"):
        step(params, params, 1)
    with pytest.raises(TypeError, match="number of the host.*`apply_target`"):
        step(params, rl.init_target(params, rl.HardCopy(1)), jnp.int32(1))

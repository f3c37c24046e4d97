"""States, optimizers and losses that a step refuses instead of going wrong with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardjax as sj
from shardjax import zero
from tests.zero.small import make_loss, plan_small, small_batch, small_params

ADAM = optax.adam(0.1)


def prepared(stage=2, mesh="8x1", **options):
    plan = plan_small(mesh, stage, ADAM, **options)
    state = zero.init_state(small_params(), ADAM, plan)
    return plan, state, zero.make_step(make_loss(), ADAM, plan)


def test_a_state_can_be_given_to_a_step_once():
    _, state, step = prepared()
    new, _ = step(state, small_batch(0))
    with pytest.raises(ValueError, match=r"step is gone: .* that the step returned"):
        step(state, small_batch(1))
    new, _ = step(new, small_batch(1))
    assert int(new.step) == 2


def test_an_array_is_in_a_state_once():
    _, state, step = prepared(stage=1)
    mu = state.opt_state[0].mu
    twice = mu | {"embedding": state.opt_state[0].nu["embedding"]}
    adam = state.opt_state[0]._replace(mu=twice)
    wrong = state.replace(opt_state=(adam, *state.opt_state[1:]))
    with pytest.raises(
        ValueError,
        match="opt_state/0/mu/embedding and opt_state/0/nu/embedding are the",
    ):
        step(wrong, small_batch(0))
    right = state.replace(
        opt_state=(
            adam._replace(mu=twice | {"embedding": jnp.copy(twice["embedding"])}),
            *state.opt_state[1:],
        )
    )
    step(right, small_batch(0))


def aligned(shape):
    """Zeros that JAX takes on a CPU without a copy."""
    raw = np.zeros(int(np.prod(shape)) * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : len(raw) - 64 + start].view(np.float32).reshape(shape)


def address(x):
    return x.addressable_shards[1].data.unsafe_buffer_pointer()


def test_arrays_of_a_state_that_share_memory_are_taken_apart():
    _, plain, step = prepared(stage=1)
    expected, _ = step(plain, small_batch(0))
    _, state, _ = prepared(stage=1)
    adam = state.opt_state[0]
    w1 = adam.nu["blocks"]["w1"]
    parts = [shard.data for shard in w1.addressable_shards]
    shared = jax.make_array_from_single_device_arrays(w1.shape, w1.sharding, parts)
    one = aligned(adam.mu["embedding"].shape)
    both = [jax.device_put(one, adam.mu["embedding"].sharding) for _ in range(2)]
    for x, y in ((shared, w1), both):
        assert x is not y and address(x) == address(y)
    adam = adam._replace(
        mu=adam.mu
        | {"embedding": both[0], "blocks": adam.mu["blocks"] | {"w1": shared}},
        nu=adam.nu | {"embedding": both[1]},
    )
    state = state.replace(opt_state=(adam, *state.opt_state[1:]))
    new, _ = step(state, small_batch(0))
    jax.tree.map(np.testing.assert_array_equal, new, expected)
    assert not one.any()


def test_a_returned_state_that_was_changed_in_place_is_looked_at_again():
    _, state, step = prepared(stage=1)
    state, _ = step(state, small_batch(0))
    state.opt_state[0].mu["embedding"] = state.opt_state[0].nu["embedding"]
    with pytest.raises(ValueError, match="must be an array of its own"):
        step(state, small_batch(1))


def test_parameters_of_another_shape_or_dtype_are_refused():
    _, state, step = prepared()
    few = state.params | {"bias": state.params["bias"].astype(jnp.bfloat16)}
    with pytest.raises(
        ValueError, match=r"bias .* planned as float32\[41\], got bfloat16"
    ):
        step(state.replace(params=few), small_batch(0))


def test_a_state_of_another_stage_is_moved_first():
    plan, _, step = prepared(stage=3)
    other = plan_small("8x1", 1, ADAM)
    state = zero.init_state(small_params(), ADAM, other)
    with pytest.raises(
        ValueError,
        match=r"params/blocks/scale of the state must lie .* P\(None, 'data'\).*place_st",
    ):
        step(state, small_batch(0))
    step(zero.place_state(state, plan), small_batch(0))


def test_other_parameters_and_numpy_arrays_are_refused():
    _, state, step = prepared()
    fewer = {k: v for k, v in state.params.items() if k != "bias"}
    with pytest.raises(
        ValueError, match="`params` of the state must have the structure"
    ):
        step(state.replace(params=fewer), small_batch(0))
    host = state.params | {"bias": np.zeros(41, np.float32)}
    with pytest.raises(TypeError, match="got ndarray at params/bias"):
        step(state.replace(params=host), small_batch(0))


def test_a_step_can_be_part_of_another_program():
    _, state, step = prepared()
    alone, info = step(prepared()[1], small_batch(0))
    again, info_again = jax.jit(step)(state, small_batch(0))
    assert float(info["loss"]) == pytest.approx(float(info_again["loss"]), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        alone.params,
        again.params,
    )


def test_another_optimizer_than_planned_is_refused(tmp_path):
    plan, sgd = plan_small("2x1", 1, ADAM), optax.sgd(0.1)
    message = "the state of `tx` must have the structure that was planned for"
    with pytest.raises(ValueError, match=message):
        zero.init_state(small_params(), sgd, plan)
    with pytest.raises(ValueError, match=message):
        zero.make_step(make_loss(), sgd, plan)
    with pytest.raises(ValueError, match=message):
        zero.DiskOptimizer(sgd, plan, tmp_path)
    half = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"a leaf of the state of `tx` must be float32"
    ):
        zero.make_step(make_loss(), half, plan)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: ("sum", jnp.float32(1)), "loss_sum .* must be a number, got str"),
        (
            lambda p, b: (jnp.float32(1), None),
            "weight .* must be a number, got NoneType",
        ),
        (
            lambda p, b: (jnp.sum(p["bias"]) * 1j, 1.0),
            "loss_sum .* real, got complex64",
        ),
    ],
)
def test_losses_are_real_numbers(loss, message):
    _, state, _ = prepared(mesh="1x1")
    step = zero.make_step(loss, ADAM, plan_small("1x1", 2, ADAM))
    with pytest.raises(TypeError, match=message):
        step(state, small_batch(0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_norm_of_gradients_in_few_bits_is_summed_in_float32(dtype):
    """1000 gradients of 300: their squares are beyond float16, their norm is not."""
    params, tx = {"w": np.ones(1000, dtype)}, optax.sgd(1e-3)
    plan = zero.plan_zero(params, tx, sj.make_mesh("8x1"), 2, min_bytes=0)

    def loss(params, batch):
        return 300 * jnp.sum(params["w"].astype(jnp.float32)), jnp.float32(1)

    step = zero.make_step(loss, tx, plan)
    _, info = step(zero.init_state(params, tx, plan), np.ones((8, 1), np.float32))
    assert info["grad_norm"].dtype == jnp.float32
    assert float(info["grad_norm"]) == pytest.approx(300 * 1000**0.5, rel=1e-6)

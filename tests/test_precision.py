"""Dtypes and the scale of a loss: the rules, step by step, and what is refused."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardjax.precision import (
    LossScaling,
    Precision,
    all_finite,
    init_scale,
    next_scale,
    with_master,
)


def scales(scaling, finite):
    state, seen = init_scale(scaling), []
    for good in finite:
        state = next_scale(scaling, state, jnp.array(good))
        seen.append((float(state.scale), int(state.good_steps), int(state.skipped)))
    return seen


def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps():
    scaling = LossScaling(8.0, growth_interval=2, smallest=2.0, largest=16.0)
    assert scales(scaling, [True, True, True, True, False, True, True]) == [
        (8, 1, 0),
        (16, 0, 0),
        (16, 1, 0),
        (16, 0, 0),  # the largest
        (8, 0, 1),
        (8, 1, 1),
        (16, 0, 1),
    ]
    assert [s for s, _, _ in scales(scaling, [False] * 4)] == [4, 2, 2, 2]


def test_no_scale_where_none_is_needed():
    assert init_scale(None) is None
    assert Precision.parse("bf16").scaling is None
    assert Precision.parse("f16").scaling == LossScaling()
    assert Precision.parse("f32") == Precision()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_number_that_is_not_finite_is_found(bad):
    tree = {"a": jnp.ones(4), "b": [jnp.ones((2, 2)), None]}
    assert bool(all_finite(tree))
    assert bool(all_finite({}))
    tree["b"][0] = tree["b"][0].at[1, 1].set(bad)
    assert not bool(all_finite(tree))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Precision(jnp.float16), "`compute` float16 needs a scaled loss"),
        (lambda: Precision(jnp.int8), "`compute` must be a floating dtype, got .*int8"),
        (lambda: Precision(reduce=jnp.int32), "`reduce` must be a floating dtype"),
        (lambda: Precision.parse("fp8"), "`precision` must be one of .* got 'fp8'"),
        (lambda: LossScaling(0.5), "must keep 0 < smallest <= initial <= largest"),
        (lambda: LossScaling(growth_interval=0), "`growth_interval` must be positive"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_small_updates_are_not_lost_with_master_copies():
    tx = with_master(optax.sgd(1.0))
    params = jnp.ones(3, jnp.bfloat16)
    plain, state = params, tx.init(params)
    grads = jnp.full(3, 2.0**-10, jnp.bfloat16)
    for _ in range(64):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        plain = optax.apply_updates(plain, -grads)
    assert params.dtype == jnp.bfloat16
    np.testing.assert_array_equal(params, jnp.full(3, 1 - 64 / 1024, jnp.bfloat16))
    np.testing.assert_array_equal(plain, jnp.ones(3, jnp.bfloat16))


def test_master_copies_need_the_parameters():
    tx = with_master(optax.sgd(1.0))
    state = tx.init(jnp.ones(3))
    with pytest.raises(ValueError, match="with_master needs the parameters"):
        tx.update(jnp.ones(3), state)

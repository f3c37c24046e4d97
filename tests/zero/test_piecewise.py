"""Which optimizers can update in pieces, and that they do."""

import jax
import jax.numpy as jnp
import optax
import pytest

from shardjax.precision import with_master
from shardjax.zero.piecewise import PiecewiseError, split_piecewise

SHAPES = {
    "w": jax.ShapeDtypeStruct((8, 16, 16), jnp.float32),
    "b": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
    "c": jax.ShapeDtypeStruct((), jnp.float32),
    "count": None,
}


def only_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize(
    ("tx", "owners"),
    [
        (optax.sgd(0.1, momentum=0.9, nesterov=True), (0, 1, 2)),
        (
            optax.adamw(optax.cosine_decay_schedule(0.1, 9), mask=only_matrices),
            (-1, 0, 1, 2, 0, 1, 2, -1),
        ),
        (with_master(optax.lion(0.1)), (0, 1, 2, -1, 0, 1, 2)),
        (optax.chain(optax.clip(1.0), optax.adagrad(0.1)), (0, 1, 2)),
    ],
)
def test_what_the_state_is_kept_for(tx, owners):
    assert split_piecewise(tx, SHAPES).owners == owners


@pytest.mark.parametrize(
    ("tx", "reason"),
    [
        (optax.adafactor(0.1, min_dim_size_to_factor=8), "a leaf of the state has"),
        (optax.lamb(0.1), "a piece that is updated alone moves in another way"),
        (
            optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.1)),
            "a gradient of nan in one row changes other rows",
        ),
        (optax.apply_if_finite(optax.sgd(0.1), 3), "a gradient of nan in one row"),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "a piece that is"),
    ],
)
def test_others_are_refused(tx, reason):
    with pytest.raises(PiecewiseError, match=reason) as error:
        split_piecewise(tx, SHAPES)
    assert "clip by `clip_norm` of the step" in str(error.value)


def test_what_fails_on_pieces_is_refused():
    matrix = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with pytest.raises(PiecewiseError, match="the update fails on|a piece|a gradient"):
        split_piecewise(optax.contrib.muon(0.1), matrix)

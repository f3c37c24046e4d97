"""What is kept for the backward pass changes no result, and names have an effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from shardjax.profiling import count_flops
from shardjax.remat import Remat, scan_layers

LAYERS, DIM = 6, 8
WEIGHTS = np.random.default_rng(0).normal(size=(LAYERS, DIM, DIM)).astype("f") / 4
X = np.random.default_rng(1).normal(size=(3, DIM)).astype("f")
CHOICES = ["none", "full", "dots", "dots_no_batch", "sqrt", "sqrt:3", "save:hidden"]
CHOICES += ["save:x,hidden", "offload:x"]


def layer(x, w):
    x = checkpoint_name(x, "x")
    return x + jnp.tanh(checkpoint_name(x @ w, "hidden"))


def loss(weights, remat):
    return jnp.sum(scan_layers(layer, X, weights, remat=remat) ** 2)


@pytest.mark.parametrize("remat", CHOICES)
def test_gradients_are_those_of_a_loop(remat):
    def looped(weights):
        x = X
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x**2)

    value, grad = jax.jit(jax.value_and_grad(lambda w: loss(w, remat)))(WEIGHTS)
    expected, wanted = jax.value_and_grad(looped)(WEIGHTS)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("remat", "passes"),
    [
        ("none", 3),
        ("full", 4),
        ("dots", 3),
        ("save:hidden", 3),
        ("save:x", 4),
        ("sqrt", 5),
        ("sqrt:6", 5),
    ],
)
def test_what_is_computed_once_more(remat, passes):
    """One product per layer forward, two backward, and one for each recomputation."""
    once = 2 * 3 * DIM * DIM * LAYERS
    flops = count_flops(jax.grad(lambda w: loss(w, remat)), WEIGHTS)
    assert flops.total == passes * once


@pytest.mark.parametrize("text", ["save:", "sqrt:0", "sqrt:x", "full:1", "half", "", 3])
def test_other_choices_are_refused(text):
    with pytest.raises(ValueError, match="`remat` must be one of none, full, .* got"):
        Remat.parse(text)


def test_a_choice_parses_to_itself():
    assert Remat.parse(Remat("sqrt", group=3)) == Remat.parse("sqrt:3")


@pytest.mark.parametrize(
    ("remat", "body", "message"),
    [
        (
            "save:other",
            layer,
            r"names \['other'\], but a layer names only \['hidden', 'x'\]",
        ),
        ("offload:other", layer, r"names \['other'\]"),
        (
            "offload:out",
            lambda x, w: checkpoint_name(layer(x, w), "out"),
            "names a layer's result, which has no effect.*Name the layer's input",
        ),
        ("sqrt:4", layer, r"must divide the 6 layers. Give one of \[1, 2, 3, 6\]"),
    ],
)
def test_choices_without_effect_are_refused(remat, body, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        scan_layers(body, X, WEIGHTS, remat=remat)


@pytest.mark.parametrize(
    "stacked", [{"a": np.ones((2, 3)), "b": np.ones((3, 3))}, np.float32(1)]
)
def test_leaves_must_have_the_layers_as_leading_dim(stacked):
    with pytest.raises(ValueError, match="must have one leading dim of the layers"):
        scan_layers(layer, X, stacked)

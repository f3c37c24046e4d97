"""Pooling and its gradients, against finite differences and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardjax.embed import lookup as reference
from shardjax.embed.exchange import pool

EXAMPLES = 4
COMBINERS = ("sum", "mean", "sqrtn")
LENGTHS = np.array([3, 0, 2, 1])


def bags(rng, features: int = len(COMBINERS)):
    """Vectors, bags and weights of jagged features; the last two ids are padding."""
    count = int(LENGTHS.sum())
    within = np.repeat(np.arange(EXAMPLES), LENGTHS)
    segments = np.concatenate([f * EXAMPLES + within for f in range(features)])
    segments = np.concatenate([segments, [features * EXAMPLES] * 2])
    n = features * count + 2
    vectors = rng.normal(size=(n, 3)).astype(np.float32)
    weights = rng.uniform(0.3, 2, n).astype(np.float32)
    return vectors, segments.astype(np.int32), weights


@pytest.mark.parametrize("weighted", [True, False])
def test_pooling_equals_the_reference(weighted):
    vectors, segments, weights = bags(np.random.default_rng(0))
    got = pool(vectors, segments, weights if weighted else None, COMBINERS, EXAMPLES)
    assert got.shape == (3, EXAMPLES, 3)
    n = int(LENGTHS.sum())
    for f, combiner in enumerate(COMBINERS):
        part = slice(f * n, (f + 1) * n)
        expected = reference.lookup(
            vectors[part],
            np.arange(n),
            LENGTHS,
            weights[part] if weighted else None,
            combiner,
        )
        np.testing.assert_allclose(got[f], expected, rtol=1e-6, atol=1e-7)


def test_the_gradient_of_a_weight_is_row_times_gradient():
    """d loss / d weight = <row, dout>; mean and sqrtn by the quotient rule."""
    rng = np.random.default_rng(1)
    vectors, segments, weights = bags(rng)
    out = rng.normal(size=(3, EXAMPLES, 3)).astype(np.float32)

    def loss(vectors, weights):
        return jnp.sum(out * pool(vectors, segments, weights, COMBINERS, EXAMPLES))

    by_vector, by_weight = jax.grad(loss, (0, 1))(vectors, weights)
    pooled = np.asarray(pool(vectors, segments, weights, COMBINERS, EXAMPLES))
    n = int(LENGTHS.sum())
    for j in range(3 * n):
        f, e = divmod(int(segments[j]), EXAMPLES)
        bag = segments == segments[j]
        if COMBINERS[f] == "sum":
            expected = vectors[j] @ out[f, e]
        elif COMBINERS[f] == "mean":
            expected = (vectors[j] - pooled[f, e]) @ out[f, e] / weights[bag].sum()
        else:
            squares = (weights[bag] ** 2).sum()
            moved = vectors[j] / np.sqrt(squares) - pooled[f, e] * weights[j] / squares
            expected = moved @ out[f, e]
        np.testing.assert_allclose(by_weight[j], expected, rtol=1e-4, atol=1e-5)
    assert not by_vector[-2:].any()  # padding
    assert not by_weight[-2:].any()


@pytest.mark.parametrize("argument", [0, 1])
def test_gradients_equal_finite_differences(argument):
    rng = np.random.default_rng(2)
    vectors, segments, weights = bags(rng)
    out = rng.normal(size=(3, EXAMPLES, 3)).astype(np.float32)

    def loss(*inputs):
        pooled = pool(inputs[0], segments, inputs[1], COMBINERS, EXAMPLES)
        return jnp.sum(jnp.sin(pooled) * out)

    inputs = (vectors, weights)
    grads = np.asarray(jax.grad(loss, argument)(*inputs))
    run, step = jax.jit(loss), 1e-2
    for at in np.ndindex(grads.shape):
        moved = [[x.copy() for x in inputs] for _ in range(2)]
        for side, x in zip((step, -step), moved, strict=True):
            x[argument][at] += side
        difference = (run(*moved[0]) - run(*moved[1])) / (2 * step)
        np.testing.assert_allclose(grads[at], difference, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weights", [None, [0, 0], [1, -1], [-2, 2], [0, 3]])
def test_empty_bags_and_zero_sums_are_finite(combiner, weights):
    vectors = np.array([[1.0, 2], [3, 5]], np.float32)
    segments = np.array([1, 1], np.int32)  # bag 0 is empty
    inputs = jnp.ones(2) if weights is None else jnp.array(weights, jnp.float32)

    def run(vectors, w):
        return pool(vectors, segments, None if weights is None else w, (combiner,), 2)

    pooled, pull = jax.vjp(run, vectors, inputs)
    assert np.isfinite(pooled).all()
    assert not pooled[0, 0].any()
    for grad in pull(jnp.ones_like(pooled)):
        assert np.isfinite(grad).all()
    if weights is not None:
        w = np.array(weights, np.float32)
        divisor = {"sum": 1, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        expected = (w @ vectors) / divisor if divisor else np.zeros(2)
        np.testing.assert_allclose(pooled[0, 1], expected, rtol=1e-6)


def test_a_batch_without_ids_pools_to_zeros():
    pooled = pool(
        jnp.zeros((8, 2)), jnp.full(8, 6, jnp.int32), jnp.zeros(8), ("mean", "sum"), 3
    )
    np.testing.assert_array_equal(pooled, np.zeros((2, 3, 2)))

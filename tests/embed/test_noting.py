import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardjax.embed.noting import note_rows, noted_ids


def look(ids, table="a"):
    return note_rows(ids, table=table, dim=2, dtype=jnp.float32)


@jax.custom_vjp
def doubled(ids):
    return 2 * look(ids, "b")


doubled.defvjp(lambda ids: (doubled(ids), None), lambda _, g: (None,))


def test_ids_are_found_wherever_they_are_looked_up():
    def f(x, w):
        def body(carry, i):
            return jnp.tanh(carry * w + look(jnp.stack([i, i + 1])).sum(0)), i

        y, _ = jax.lax.scan(jax.checkpoint(body), w, jnp.arange(3))
        y = jax.jit(lambda y: y + look(x).sum(0))(y)
        y = jax.lax.cond(w[0] > 5, lambda y: y + look(x[:2])[0], lambda y: -y, y)
        y = jax.lax.cond(w[0] < 5, lambda y: y + look(x[:2])[0], lambda y: -y, y)
        y = y + doubled(x + 4).sum(0)
        y = y + jax.grad(lambda y: jnp.sum(y * look(x[1:])[0]))(y)
        return y + jax.vmap(look, 1, 1)(jnp.stack([x, x + 9], 1)).sum((0, 1))

    found = jax.jit(lambda *args: noted_ids(f, *args))(jnp.arange(4), jnp.ones(2))
    assert found.keys() == {"a", "b"}
    (doubles,) = found["b"]
    np.testing.assert_array_equal(doubles, [4, 5, 6, 7])
    loop, direct, skipped, taken, inside, mapped = found["a"]
    np.testing.assert_array_equal(loop, [[0, 1], [1, 2], [2, 3]])
    np.testing.assert_array_equal(direct, [0, 1, 2, 3])
    np.testing.assert_array_equal(skipped, [-1, -1])
    np.testing.assert_array_equal(taken, [0, 1])
    np.testing.assert_array_equal(inside, [1, 2, 3])
    assert sorted(np.ravel(mapped)) == [0, 1, 2, 3, 9, 10, 11, 12]


def test_only_what_ids_depend_on_is_computed():
    def f(ids, x):
        return jnp.linalg.inv(x @ x).sum() + look(2 * ids).sum()

    ids, x = jnp.arange(3), jnp.eye(4)
    jaxpr = str(jax.make_jaxpr(lambda *args: noted_ids(f, *args))(ids, x))
    assert "mul" in jaxpr and "dot_general" not in jaxpr and "lu" not in jaxpr


def test_functions_without_lookups_note_nothing():
    assert noted_ids(lambda x: x + 1, jnp.ones(2)) == {}


def test_a_lookup_in_a_while_loop_is_refused():
    def f(x):
        def body(y):
            return y + look(x).sum()

        return jax.lax.while_loop(lambda y: y < 3, body, 0.0)

    with pytest.raises(NotImplementedError, match="inside of 'while'.*jax.lax.scan"):
        noted_ids(f, jnp.arange(2))


def test_ids_that_depend_on_rows_are_refused():
    def f(x):
        best = jnp.argmax(look(x, "items").sum(1))
        return look(best, "users").sum()

    with pytest.raises(NotImplementedError, match=r"must not depend.*\['items'\]"):
        noted_ids(f, jnp.arange(2))

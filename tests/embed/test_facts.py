"""What tells processes that they have other functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardjax import embed
from shardjax.embed.facts import program_hash

ROWS = jax.ShapeDtypeStruct((2, 4), np.float32)


def of_optimizer(tx):
    return program_hash(lambda g, p: tx.update(g, tx.init(p), p), ROWS, ROWS)


def of_initializer(initializer):
    key = jax.eval_shape(lambda: jax.random.key(0))
    return program_hash(lambda k: initializer(k, (4,), jnp.float32), key)


def test_equal_functions_have_one_hash_and_others_another():
    """Also a number that is in a closure, a schedule, the state or an array."""
    weights = np.arange(4, dtype=np.float32)
    made = [
        lambda: of_optimizer(optax.adam(1e-3)),
        lambda: of_optimizer(optax.adam(1e-2)),
        lambda: of_optimizer(optax.adam(1e-3, b2=0.99)),
        lambda: of_optimizer(optax.adam(1e-3, eps=1e-7)),
        lambda: of_optimizer(optax.sgd(1e-3)),
        lambda: of_optimizer(optax.sgd(optax.cosine_decay_schedule(1e-3, 100))),
        lambda: of_optimizer(optax.sgd(optax.cosine_decay_schedule(1e-3, 200))),
        lambda: of_optimizer(optax.inject_hyperparams(optax.sgd)(1e-3)),
        lambda: of_optimizer(optax.inject_hyperparams(optax.sgd)(1e-2)),
        lambda: of_optimizer(embed.rowwise_adagrad(0.1)),
        lambda: of_optimizer(embed.rowwise_adagrad(0.1, initial_accumulator=1.0)),
        lambda: of_initializer(embed.uniform(0.1)),
        lambda: of_initializer(embed.uniform(0.2)),
        lambda: of_initializer(embed.zeros()),
        lambda: of_initializer(jax.nn.initializers.normal(0.1)),
        lambda: of_initializer(lambda k, shape, dtype: jnp.asarray(weights)),
        lambda: of_initializer(lambda k, shape, dtype: jnp.asarray(2 * weights)),
    ]
    first, again = ([make() for make in made] for _ in range(2))
    assert first == again
    assert len({*first}) == len(made), first


def test_functions_in_a_program_do_not_show_where_they_lie():
    def initializer():
        @jax.custom_jvp
        def own(x):
            return 2 * x

        own.defjvp(lambda x, dx: (own(*x), 2 * dx[0]))
        return lambda key, shape, dtype: own(jax.random.normal(key, shape, dtype))

    kept = initializer()  # so that the other is not where this was
    assert of_initializer(kept) == of_initializer(initializer())

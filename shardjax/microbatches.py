"""A batch that goes through the model a microbatch at a time, gradients accumulated.

Two loops give the same result::

    all           scan over all microbatches
    up to the     a loop that each device leaves after its last microbatch with an example
    last          of weight: padding costs nothing, and devices may have unequal parts

In the second one devices take different numbers of turns, so nothing inside may wait for
another device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardjax.remat import equations

_COLLECTIVES = (
    "all_gather",
    "all_to_all",
    "pmax",
    "pmin",
    "ppermute",
    "psum",
    "ragged_all_to_all",
    "reduce_scatter",
)  # fmt: skip


def in_microbatches(
    grad_of: Callable[..., Any],
    size: int | None,
    params: Any,
    model_state: Any,
    blocks: Any,
    data: tuple[Any, ...],
    counts: jax.Array | None = None,
) -> tuple[jax.Array, Any, Any, tuple[jax.Array, jax.Array, Any]]:
    """Value and gradients of a device's examples, `size` of them at a time.

    Args:
      grad_of: of (params, blocks, model_state, *data), returns ((gradient of params,
        gradient of blocks), (value, logits, losses, model_state)).
      size: examples of a microbatch; None for all.
      params: what is differentiated.
      model_state: what one microbatch hands to the next.
      blocks: differentiated too; a leading dim of examples.
      data: the rest, a leading dim of examples.
      counts: bool [examples], which examples count. With it, what lies behind the last
        microbatch that has one is not computed: gradients, logits and losses there are
        zero, and the model's state stays as it is.

    Returns:
      value, gradient of params, gradient of blocks, (logits, losses, model_state).

    Raises:
      ValueError: with `counts`, if devices wait for each other in a microbatch.

    Example:
      >>> def grad_of(w, x, state):
      ...   return (x.sum(), w * jnp.ones_like(x)), (w * x.sum(), x, x, state + 1)
      >>> x = jnp.array([1.0, 2.0, 0.0, 0.0])
      >>> value, grad, _, (*_, turns) = in_microbatches(
      ...   grad_of, 1, jnp.float32(3), 0, x, (), counts=x > 0)
      >>> float(value), float(grad), int(turns)
      (9.0, 3.0, 2)
    """
    examples = len(jax.tree.leaves((blocks, data))[0])
    count = 1 if size is None else max(-(-examples // size), 1)
    if count == 1 and counts is None:
        (grads, block_grads), (value, *aux) = grad_of(
            params, blocks, model_state, *data
        )
        return value, grads, block_grads, tuple(aux)
    size = -(-examples // count)
    padding = count * size - examples

    def split(x):
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, size, *x.shape[1:])

    def join(x):
        return x.reshape(count * size, *x.shape[2:])[:examples]

    def body(carry, part):
        value, grads, model_state = carry
        blocks, data = part
        (g, block_grads), (v, logits, losses, model_state) = grad_of(
            params, blocks, model_state, *data
        )
        grads = jax.tree.map(jnp.add, grads, g)
        return (value + v, grads, model_state), (block_grads, logits, losses)

    parts = jax.tree.map(split, (blocks, data))
    first_blocks, first_data = jax.tree.map(lambda x: x[0], parts)
    arguments = params, first_blocks, model_state, *first_data
    if counts is None:
        (shapes, _), _ = jax.eval_shape(grad_of, *arguments)
        carry = jnp.zeros([]), _zeros(shapes), model_state
        carry, outputs = jax.lax.scan(body, carry, parts)
    else:
        jaxpr, found = jax.make_jaxpr(grad_of, return_shape=True)(*arguments)
        _check_alone(jaxpr)
        (shapes, block_shapes), (_, logits, losses, _) = found
        outputs = _zeros((block_shapes, logits, losses), count)
        carry = jnp.zeros([]), _zeros(shapes), model_state
        numbers = jnp.arange(1, count + 1)
        turns = jnp.max(jnp.where(split(counts).any(1), numbers, 0))
        carry, outputs = _up_to(turns, body, carry, parts, outputs)
    value, grads, model_state = carry
    block_grads, logits, losses = jax.tree.map(join, outputs)
    return value, grads, block_grads, (logits, losses, model_state)


def _zeros(shapes: Any, *leading: int) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), shapes)


def _up_to(turns, body, carry, parts, outputs):
    """The first `turns` of a scan; what it would give for the others is in `outputs`."""

    def turn(i, both):
        carry, outputs = both
        part = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), parts
        )
        carry, more = body(carry, part)
        outputs = jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0),
            outputs,
            more,
        )
        return carry, outputs

    return jax.lax.fori_loop(0, turns, turn, (carry, outputs))


def _check_alone(jaxpr) -> None:
    """Refuses a microbatch in which a device waits for others, which may take no part."""
    names = {equation.primitive.name for equation in equations(jaxpr)}
    found = sorted(name for name in names if name.startswith(_COLLECTIVES))
    if found:
        raise ValueError(
            "`skip_padding` needs a network that each device computes for itself, as"
            f" devices take different numbers of microbatches, got one with {found}: its"
            " layers gather their parameters (ZeRO stage 3 with `blocks`), or it names a"
            " mesh axis, such as a batch norm with `axis_name`. Leave one of them out"
        )

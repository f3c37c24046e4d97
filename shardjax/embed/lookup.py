"""The unsharded reference: plain arrays, dense gradients. It defines what is correct.

Sharded lookups, placements, optimizers and tiers must equal these functions on one
device; the test suite compares them. Nothing here is fast.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def lookup(
    table: jax.Array,
    rows: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray | jax.Array | None = None,
    combiner: str = "sum",
) -> jax.Array:
    """Pools rows of a table, a bag per example.

    Args:
      table: [vocabulary, dim].
      rows: int32 [total], row of each id; -1 reads zeros (and counts in a mean).
      lengths: int32 [batch], ids per example.
      weights: float32 [total], or None for all one.
      combiner: "sum": sum of w * row; "mean": that divided by the sum of w; "sqrtn":
        divided by the root of the sum of w * w. A zero divisor gives zeros.

    Returns:
      [batch, dim].

    Example:
      >>> lookup(jnp.eye(2), np.array([0, 1]), np.array([0, 2]), None, "mean")
      Array([[0. , 0. ],
             [0.5, 0.5]], dtype=float32)
    """
    batch = len(lengths)
    bags = np.repeat(np.arange(batch), lengths)
    w = jnp.ones(len(rows)) if weights is None else jnp.asarray(weights)
    present = jnp.asarray(rows >= 0)[:, None]
    vectors = jnp.where(present, table[np.maximum(rows, 0)], 0) * w[:, None]
    sums = jnp.zeros((batch, table.shape[1])).at[bags].add(vectors)
    if combiner == "sum":
        return sums
    squared = combiner == "sqrtn"
    divisor = jnp.zeros(batch).at[bags].add(w * w if squared else w)
    safe = jnp.where(divisor == 0, 1, divisor)
    safe = jnp.sqrt(safe) if squared else safe
    return jnp.where((divisor == 0)[:, None], 0, sums / safe[:, None])


def lookup_sequence(
    table: jax.Array, rows: np.ndarray, lengths: np.ndarray, length: int
) -> tuple[jax.Array, np.ndarray]:
    """Pads the rows of each example to `length`.

    Args:
      table: [vocabulary, dim].
      rows: int32 [total]; -1 reads zeros.
      lengths: int32 [batch], at most `length` each.
      length: positions.

    Returns:
      [batch, length, dim] and the mask, bool [batch, length].
    """
    mask = np.arange(length) < np.asarray(lengths)[:, None]
    index = np.full(mask.shape, -1)
    index[mask] = rows
    present = jnp.asarray(index >= 0)[..., None]
    return jnp.where(present, table[np.maximum(index, 0)], 0), mask


def update(
    tx: optax.GradientTransformation,
    table: jax.Array,
    state,
    grads: jax.Array,
    touched: np.ndarray,
):
    """A dense optax step of which only the touched rows are kept.

    Args:
      tx: the row optimizer.
      table: [vocabulary, dim].
      state: of `tx` for the whole table.
      grads: [vocabulary, dim], dense.
      touched: bool [vocabulary], rows the batch names.

    Returns:
      The table and the state after the step. State leaves that have no row dim move on.
    """
    updates, after = tx.update(grads, state, table)
    moved = optax.apply_updates(table, updates)

    def keep(new, old):
        if new.ndim == 0 or new.shape[0] != len(touched):
            return new
        rows = touched.reshape(-1, *[1] * (new.ndim - 1))
        return jnp.where(rows, new, old)

    return keep(moved, table), jax.tree.map(keep, after, state)

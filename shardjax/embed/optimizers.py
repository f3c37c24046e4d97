"""Row optimizers: any optax transformation that treats every row by itself.

A step touches a few rows of a table. Their gradients, values and optimizer state are
gathered into arrays `[rows, dim]`, `tx.update` runs on those, and the results go back.
That is the dense update restricted to the touched rows exactly when no number of one row
depends on another row; `split_state` finds out by trial and refuses the others.

Rows that a step does not touch do not move at all: no weight decay, no momentum. For
Adam this is what other libraries call lazy or sparse Adam.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardjax.partition import leaf_path


class RowwiseAdagradState(NamedTuple):
    """State of `rowwise_adagrad`."""

    count: jax.Array  # int32 [], steps taken
    accumulator: Any  # per parameter: float32 [rows], sum of mean squared gradients


def rowwise_adagrad(
    learning_rate: float | Callable[[jax.Array], jax.Array],
    initial_accumulator: float = 0.0,
    eps: float = 1e-10,
) -> optax.GradientTransformation:
    """Adagrad with one accumulator per row: 1/dim of the state of Adagrad.

    For a row with gradient g: a += mean(g * g), then row -= lr * g / (sqrt(a) + eps).
    The present gradient is added before the division, as in FBGEMM's
    EXACT_ROWWISE_ADAGRAD (Paddle's rule divides first).

    Args:
      learning_rate: a number, or a schedule: a function of the step count.
      initial_accumulator: what the accumulator of a new row holds.
      eps: added to the root; a zero gradient moves nothing, whatever the accumulator.

    Returns:
      An optax transformation for parameters of shape [rows, dim].

    Raises:
      ValueError: for a negative rate, accumulator or eps.

    Example:
      >>> tx = rowwise_adagrad(0.1)
      >>> rows = jnp.ones((2, 4))
      >>> updates, state = tx.update(rows, tx.init(rows), rows)
      >>> [round(float(u), 3) for u in updates[:, 0]], state.accumulator.shape
      ([-0.1, -0.1], (2,))
    """
    for name, value in (
        ("learning_rate", 0 if callable(learning_rate) else learning_rate),
        ("initial_accumulator", initial_accumulator),
        ("eps", eps),
    ):
        if not value >= 0:
            raise ValueError(f"`{name}` must not be negative, got {value}")

    def init(params):
        def accumulator(p):
            return jnp.full(p.shape[:-1], initial_accumulator, jnp.float32)

        return RowwiseAdagradState(
            jnp.zeros([], jnp.int32), jax.tree.map(accumulator, params)
        )

    def update(grads, state, params=None):
        del params
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def accumulate(a, g):
            return a + jnp.mean(jnp.square(g.astype(jnp.float32)), axis=-1)

        accumulator = jax.tree.map(accumulate, state.accumulator, grads)

        def step(a, g):
            return (g * (-rate / (jnp.sqrt(a) + eps))[..., None]).astype(g.dtype)

        updates = jax.tree.map(step, accumulator, grads)
        return updates, RowwiseAdagradState(state.count + 1, accumulator)

    return optax.GradientTransformation(
        init,
        update,  # pyright: ignore[reportArgumentType]
    )


_NOT_ROWWISE = (
    "The optimizer of table {table!r} does not work row by row: {reason}. LAMB, Adafactor"
    " and clipping by a global norm need the gradient of the whole table, which never"
    " exists here. Use an elementwise transformation (optax.adam, optax.adagrad,"
    " optax.sgd, ...; optax.clip to clip each element) or"
    " shardjax.embed.rowwise_adagrad."
)


# The last is large: what Adafactor keeps depends on whether a dim reaches 128.
_TRIAL_ROWS = (5, 7, 4096)


class RowOptimizerError(ValueError):
    """An optimizer that cannot update the rows of a table one by one."""


# of (optimizer, rows [n, dim], its state of these rows): what to read instead, [n, dim]
RowView = Callable[[optax.GradientTransformation, Any, Any], Any]


@dataclass(frozen=True)
class RowOptimizer:
    """An optax transformation with its state split into per-row and shared leaves.

    Attributes:
      tx: the transformation.
      treedef: structure of its state.
      is_row: per leaf of the state, whether its leading dim is the row dim.
      row_leaves: shape (without the row dim) and dtype of each per-row leaf.
    """

    tx: optax.GradientTransformation
    treedef: Any
    is_row: tuple[bool, ...]
    row_leaves: tuple[jax.ShapeDtypeStruct, ...]

    def split(self, state) -> tuple[list[jax.Array], list[jax.Array]]:
        """The per-row leaves and the shared leaves of a state."""
        leaves = self.treedef.flatten_up_to(state)
        rows = [x for x, row in zip(leaves, self.is_row, strict=True) if row]
        shared = [x for x, row in zip(leaves, self.is_row, strict=True) if not row]
        return rows, shared

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Paths of the per-row leaves and of the shared leaves in the state."""
        numbered = self.treedef.unflatten(range(len(self.is_row)))
        paths = [leaf_path(p) for p, _ in jax.tree_util.tree_leaves_with_path(numbered)]
        both = list(zip(paths, self.is_row, strict=True))
        return tuple(p for p, row in both if row), tuple(
            p for p, row in both if not row
        )

    def join(self, rows: list[jax.Array], shared: list[jax.Array]):
        """The state with these per-row and shared leaves."""
        rows, shared = list(rows), list(shared)
        return self.treedef.unflatten(
            [rows.pop(0) if row else shared.pop(0) for row in self.is_row]
        )

    def view(self, view: "RowView", rows, row_state, shared):
        """What a view makes of some rows [n, dim] and their state."""
        return view(self.tx, rows, self.join(row_state, shared))

    def init(self, rows: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The per-row and shared leaves of the state of new rows, [n, dim]."""
        return self.split(self.tx.init(rows))

    def update(self, grads, row_state, shared, rows):
        """One step for these rows.

        Args:
          grads: [n, dim], the sum of each row's gradients.
          row_state: per-row leaves, [n, ...] each.
          shared: shared leaves.
          rows: [n, dim], the rows before the step.

        Returns:
          The new rows, per-row leaves and shared leaves.
        """
        state = self.join(row_state, shared)
        updates, state = self.tx.update(grads, state, rows)
        row_state, shared = self.split(state)
        moved: Any = optax.apply_updates(rows, updates)
        return moved, row_state, shared


@lru_cache(maxsize=256)  # a trial compiles a program
def split_state(
    tx: optax.GradientTransformation, dim: int, dtype, table: str
) -> RowOptimizer:
    """Checks that `tx` works row by row and tells its per-row from its shared state.

    The check runs two steps on four random rows, then again with the rows in another
    order, and with one row's gradient NaN, infinite and large: every other row and every
    shared leaf must stay as it was.

    Args:
      tx: the transformation.
      dim: numbers per row.
      dtype: of the rows.
      table: the table's name, for errors.

    Raises:
      RowOptimizerError: if a row's update depends on other rows, on the row's place, or
        cannot be computed from (gradients, state, rows) at all.
    """

    def fail(reason, cause=None):
        raise RowOptimizerError(
            _NOT_ROWWISE.format(table=table, reason=reason)
        ) from cause

    try:
        states = [
            jax.eval_shape(tx.init, jax.ShapeDtypeStruct((n, dim), dtype))
            for n in _TRIAL_ROWS
        ]
    except Exception as e:
        fail(f"its init fails on rows of shape [n, {dim}] ({e})", e)
    treedef = jax.tree.structure(states[0])
    if any(jax.tree.structure(s) != treedef for s in states):
        fail("the structure of its state depends on the number of rows")
    leaves = list(zip(*map(jax.tree.leaves, states), strict=True))
    is_row = tuple(len({x.shape for x in leaf}) > 1 for leaf in leaves)
    row_leaves = []
    for leaf, row in zip(leaves, is_row, strict=True):
        rest = leaf[0].shape[1:]
        if row and [x.shape for x in leaf] != [(n, *rest) for n in _TRIAL_ROWS]:
            fail(
                "a leaf of its state has the shapes"
                f" {[x.shape for x in leaf]} for {list(_TRIAL_ROWS)} rows, not [rows, ...]"
            )
        if row:
            row_leaves.append(jax.ShapeDtypeStruct(rest, leaf[0].dtype))
    optimizer = RowOptimizer(tx, treedef, is_row, tuple(row_leaves))
    _try_rows(optimizer, dim, dtype, fail)
    return optimizer


def _try_rows(optimizer: RowOptimizer, dim: int, dtype, fail) -> None:
    @jax.jit
    def two_steps(grads, rows):
        state, shared = optimizer.init(rows)
        for g in grads:
            rows, state, shared = optimizer.update(g, state, shared, rows)
        return [rows, *state], shared

    random = np.random.default_rng(0)
    rows = random.normal(size=(4, dim)).astype(dtype)
    grads = random.normal(size=(2, 4, dim)).astype(dtype)

    def numbers(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).astype(np.float64)

    def run(grads, rows):
        return jax.tree.map(numbers, two_steps(grads, rows))

    try:
        per_row, shared = run(grads, rows)
    except Exception as e:
        fail(f"its update fails on (gradients, state, rows) ({e})", e)

    def same(a, b):
        return all(
            np.allclose(x, y, rtol=1e-3, atol=1e-6, equal_nan=True)
            for x, y in zip(a, b, strict=True)
        )

    order = np.array([2, 0, 3, 1])
    moved, _ = run(grads[:, order], rows[order])
    if not same([x[order] for x in per_row], moved):
        fail("a row's update depends on its place among the rows")
    for poison in (np.nan, np.inf, 1e4):
        bad = grads.copy()
        bad[:, 0] = poison
        others, shared_too = run(bad, rows)
        if not same([x[1:] for x in per_row], [x[1:] for x in others]):
            fail(f"a gradient of {poison} in one row changes the update of other rows")
        if not same(shared, shared_too):
            fail(f"a gradient of {poison} in one row changes state shared by all rows")

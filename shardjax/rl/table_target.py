"""Target networks of embedding tables: what a row was when all were last copied.

A table may have more rows than memory has room for twice, rows that come and go, and rows
in RAM and on disk. Copying it whole every N steps would stop training for as long as reading
all of it takes. Here nothing is copied when a copy is due: the number of copies made so far,
the *epoch*, goes up, which takes no time, and a row saves its value at its first update after
that (copy on write)::

    epoch                    count // every + 1, of the step count alone
    before a row's update    if row.epoch != epoch: target, row.epoch = row, epoch
    reading the target       row.epoch == epoch ? target : row

All rows of all devices change their epoch between the same two steps, so that what is read is
what the whole table was at one step, bit for bit; a mixture of steps, as of tables that copy
what each worker has touched, never exists.

`keep_target` wraps the optimizer of a table: target and epoch are state of the row. They move
with it to RAM and disk, grow with the slab, lie in checkpoints and are restored on other
meshes like its moments. A row that leaves for good is forgotten by the target too; one that
comes, or comes back, starts with its first value in both. What `load_rows` writes is no
update: the target of a row that has not been updated since the last copy shows it at once.

Memory: a row grows by one value of its own and 4 bytes. With Adam that is a third more, with
one accumulator per row about twice as much.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardjax.rl.target import (
    HardCopy,
    Polyak,
    TargetRule,
    apply_target,
    check_rule,
    init_target,
)

Mode = Literal["write", "copy"]


class RowTargetState(NamedTuple):
    """State of `keep_target`."""

    count: jax.Array  # int32 [], steps taken
    mark: jax.Array  # int32 [rows]; the epoch of target, or the steps it has followed
    target: jax.Array  # [rows, dim]; of the rows' dtype; averages float32 at least
    inner: Any  # of the optimizer


@dataclass(frozen=True)
class _Kept:
    """`init` of an optimizer with a target; says of which kind."""

    tx: optax.GradientTransformation
    rule: TargetRule
    mode: Mode

    def __call__(self, params: jax.Array) -> RowTargetState:
        return RowTargetState(
            jnp.zeros([], jnp.int32),
            jnp.zeros(params.shape[:1], jnp.int32),
            init_target(params, self.rule),
            self.tx.init(params),
        )


def keep_target(
    tx: optax.GradientTransformation, rule: TargetRule, mode: Mode = "write"
) -> optax.GradientTransformation:
    """A row optimizer that keeps a target of each row.

    Args:
      tx: the optimizer of the rows. Wrap it last: `keep_target(optax.chain(...), rule)`.
      rule: `HardCopy(every)`: what each row was at the last step that `every` divides, the
        first included. `Polyak(tau)`: an average of each row that moves by `tau` of the
        distance after each step, in float32 or wider, for all rows of the table: a row that
        no step touches stays what it is, so that k steps of its target are one of
        1 - (1 - tau)^k, made up for when it is touched or read.
      mode: of a HardCopy. "write": a row saves its value at its first update after a copy,
        which costs reading and writing the target of the rows of each step. "copy":
        `copy_targets` copies the whole table when it is due, which is cheaper for a small
        table whose rows all lie on the devices.

    Returns:
      An optax transformation for parameters [rows, dim], for the `optimizer` of a TableSpec.

    Raises:
      TypeError: for something else than a rule.
      ValueError: for another mode.

    Example:
      >>> tx = keep_target(optax.sgd(1.0), HardCopy(every=2))
      >>> rows = jnp.zeros((1, 2))
      >>> state = tx.init(rows)
      >>> for step in range(3):
      ...   print(read_target(tx, rows, state)[0, 0], rows[0, 0])
      ...   updates, state = tx.update(jnp.full((1, 2), -1.0), state, rows)
      ...   rows = optax.apply_updates(rows, updates)
      0.0 0.0
      0.0 1.0
      2.0 2.0
    """
    check_rule(rule)
    modes = ("write", "copy") if isinstance(rule, HardCopy) else ("write",)
    if mode not in modes:
        raise ValueError(
            f"`mode` of a table's target must be one of {', '.join(modes)} for {rule}, got"
            f" {mode!r}. 'write' is for all tables, 'copy' for hard copies of small ones"
        )

    def update(grads, state, params=None):
        assert params is not None, "a row optimizer gets the rows"
        updates, inner = tx.update(grads, state.inner, params)
        mark, target = state.mark, state.target
        # a mark only grows; made of the old one, it is written after that has been read, in
        # place: XLA copies all marks otherwise
        if isinstance(rule, Polyak):
            moved: Any = optax.apply_updates(params, updates)
            target = _towards(moved, _followed(state, params, rule.tau), rule.tau)
            mark = jnp.maximum(mark, state.count + 1)
        elif mode == "write":
            epoch = _epoch(state.count, rule.every)
            target = jnp.where((mark != epoch)[:, None], params, target)
            mark = jnp.maximum(mark, epoch)
        return updates, RowTargetState(state.count + 1, mark, target, inner)

    return optax.GradientTransformation(
        _Kept(tx, rule, mode),  # pyright: ignore[reportArgumentType]
        update,  # pyright: ignore[reportArgumentType]
    )


def _epoch(count: jax.Array, every: int) -> jax.Array:
    """The number of copies made before step `count`; 0 is of rows never updated."""
    return count // every + 1


def _towards(rows: jax.Array, target: jax.Array, part) -> jax.Array:
    return target + part * (rows.astype(target.dtype) - target)


def _followed(state: RowTargetState, rows: jax.Array, tau: float) -> jax.Array:
    """Targets after the steps in which the rows have not been touched."""
    steps = (state.count - state.mark).astype(jnp.float32)[:, None]
    return _towards(rows, state.target, -jnp.expm1(steps * math.log1p(-tau)))


def read_target(
    tx: optax.GradientTransformation, rows: jax.Array, state: RowTargetState
) -> jax.Array:
    """What the target is of some rows, at the step that comes next.

    A view of rows for `EmbeddingCollection.gather_rows`, inside a step, and for
    `lookup_rows`, on the host.

    Args:
      tx: the rows' optimizer, of `keep_target`.
      rows: [n, dim].
      state: of `tx`, of these rows.

    Returns:
      [n, dim] in the rows' dtype. It has no gradient.

    Raises:
      ValueError: if the optimizer keeps no target.
    """
    kept = _kept(tx)
    if isinstance(kept.rule, Polyak):
        target = _followed(state, rows, kept.rule.tau)
    elif kept.mode == "copy":
        target = state.target
    else:
        saved = state.mark == _epoch(state.count, kept.rule.every)
        target = jnp.where(saved[:, None], state.target, rows)
    return jax.lax.stop_gradient(target.astype(rows.dtype))


def copy_targets(tx: optax.GradientTransformation, rows: jax.Array, state: Any) -> Any:
    """Copies a table whose `mode` is "copy", if that is due before the step that comes next.

    To be mapped over the tables at the start of each step,
    `collection.map_row_state(tables, copy_targets)`, in the jitted step. Tables of other
    kinds stay as they are. Where no copy is due, none is made.

    Args:
      tx: the rows' optimizer.
      rows: [slots, dim].
      state: of `tx`, of all slots.

    Returns:
      The state with the target as it has to be.
    """
    kept: Any = tx.init
    if not isinstance(kept, _Kept) or kept.mode != "copy":
        return state
    target = apply_target(kept.rule, rows, state.target, state.count)
    return state._replace(target=target)


def check_targets(groups: Iterable[Any], rule: TargetRule) -> None:
    """Sees to it that each table of a collection has a target, of the same steps.

    Args:
      groups: of the collection.
      rule: of the network's target.

    Raises:
      ValueError: for a table without a target, with one of another rule, or of mode "copy"
        where rows do not all lie on the devices.
    """
    for group in groups:
        names = [table.spec.name for table in group.tables]
        kept = _kept(group.optimizer.tx, f" of table {names[0]!r}")
        if kept.rule != rule:
            raise ValueError(
                f"the target of table {names[0]!r} must follow as the network's, {rule}, got"
                f" {kept.rule}: what is read would be of two different steps"
            )
        if kept.mode == "copy" and group.storage is not None:
            raise ValueError(
                f"the target of table {names[0]!r} must not have mode 'copy': rows in RAM"
                f" and on disk ({group.storage}) would be left out. Use mode 'write'"
            )


def _kept(tx: optax.GradientTransformation, table: str = "") -> _Kept:
    kept: Any = tx.init
    if not isinstance(kept, _Kept):
        raise ValueError(
            f"the rows' optimizer{table} must keep a target, got {tx}. Wrap it, as the last"
            " thing: `rl.keep_target(tx, rl.HardCopy(every))`"
        )
    return kept

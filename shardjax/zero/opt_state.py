"""Where the state of an optimizer lies: with the parameters that it is kept for."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from shardjax.partition import make_spec


def opt_state_specs(
    tx: optax.GradientTransformation, abstract_state: PyTree, leaves: PyTree
) -> PyTree:
    """A PartitionSpec per leaf of an optimizer's state.

    What has the shape of its parameter is split like it. What has some of its dims, as the
    factors of Adafactor, keeps the entries of those. Counts and the like are whole.

    Args:
      tx: the optimizer.
      abstract_state: shapes of its state, from `jax.eval_shape(tx.init, params)`.
      leaves: a `LeafPlan` for each parameter, None for those that are not trained.
    """

    return map_opt_state(
        tx,
        lambda leaf, plan: _spec_like(tuple(leaf.shape), plan),
        abstract_state,
        leaves,
        shared=PartitionSpec(),
    )


def map_opt_state(
    tx: optax.GradientTransformation,
    of_param: Callable[[Any, Any], Any],
    state: PyTree,
    params: PyTree,
    *,
    shared: Any,
) -> PyTree:
    """A tree like the state of an optimizer.

    Args:
      tx: the optimizer.
      of_param: of a leaf that is kept for a parameter, and that parameter's value.
      state: its state.
      params: a value for each parameter, None for those that are not trained.
      shared: what other leaves, counts and the like, are to be.
    """

    def of_leaf(leaf, value):
        masked = isinstance(leaf, optax.MaskedNode)
        return leaf if masked else of_param(leaf, value)

    return optax.tree_map_params(
        tx,
        of_leaf,
        state,
        params,
        transform_non_params=lambda _: shared,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def _spec_like(shape: tuple[int, ...], plan) -> PartitionSpec:
    """The spec of a state leaf of this shape, kept for a parameter."""
    entries = list(plan.split_spec) + [None] * (len(plan.shape) - len(plan.split_spec))
    if shape == plan.shape:
        return plan.split_spec
    kept: list[Any] = []
    dims = iter(zip(plan.shape, entries, strict=True))
    for size in shape:
        entry = next((e for s, e in dims if s == size), _MISSING)
        if entry is _MISSING:
            return PartitionSpec()
        kept.append(entry)
    return make_spec(kept)


_MISSING = object()


def trained_only(leaves, tree: PyTree) -> PyTree:
    """A tree with None for what is not trained: nothing, to JAX and to optax.

    Args:
      leaves: a `LeafPlan` per leaf of the tree, in its order.
      tree: like the parameters.
    """
    flat, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        [x if p.trained else None for x, p in zip(flat, leaves, strict=True)]
    )


def check_opt_state(
    abstract_state: PyTree, opt_state: PyTree, what: str = "`opt_state`"
) -> None:
    """Checks that a state is the one that was planned for.

    Args:
      abstract_state: shapes and dtypes, as of `ZeroPlan.abstract_opt_state`.
      opt_state: whole arrays, or their shapes.
      what: its name, for messages.

    Raises:
      ValueError: if its structure, or a shape or dtype differs.
    """
    structures = [jax.tree.structure(x) for x in (abstract_state, opt_state)]
    if structures[0] != structures[1]:
        raise ValueError(
            f"{what} must have the structure that was planned for, {structures[0]}, got"
            f" {structures[1]}. Plan with this optimizer"
        )
    leaves = [jax.tree.leaves(x) for x in (abstract_state, opt_state)]
    for wanted, x in zip(*leaves, strict=True):
        if (x.shape, x.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"a leaf of {what} must be {wanted.dtype}{list(wanted.shape)}, got"
                f" {x.dtype}{list(x.shape)}. Plan with this optimizer, and give whole arrays"
                " of the planned parameters"
            )

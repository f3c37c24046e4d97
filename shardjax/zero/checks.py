"""What is refused of a state or an optimizer before a step can do harm with it.

A step gives its state's arrays away. A runtime that is given an array which is gone, or the
same one twice, may end the process instead of raising (jaxlib 0.10 does on CPUs), so this is
looked at first. What a step has returned itself is in order; only other states are looked
at closely.
"""

import weakref
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardjax.partition import leaf_path
from shardjax.zero.opt_state import check_opt_state
from shardjax.zero.plan import ZeroPlan


class StateCheck:
    """Looks at the states that a step is called with.

    Args:
      parts: of the state, by field, to look at closely: their shapes and shardings, as
        of `abstract_state`.
    """

    def __init__(self, parts: dict[str, PyTree]):
        self._parts = parts
        self._last = lambda: None
        self._leaves: list[int] = []

    def __call__(self, state: Any) -> Any:
        """Refuses a state that the step must not be called with.

        Returns:
          It. Where two of its arrays share memory, with a copy of one.

        Raises:
          TypeError: if a leaf is no array of JAX.
          ValueError: if one is gone, is there twice, lies elsewhere than planned, or has
            another shape or dtype.
        """
        leaves = jax.tree.leaves(state)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return state  # inside a jit of the user's, to which all of this is unknown
        if not all(isinstance(x, jax.Array) for x in leaves):
            _refuse_foreign(state)
        if any(x.is_deleted() for x in leaves):
            _refuse_gone(state)
        numbers = [id(x) for x in leaves]
        if state is self._last() and numbers == self._leaves:
            return state  # also what is in it, which could be changed in place
        _refuse_twice(state)
        for name, wanted in self._parts.items():
            _refuse_others(name, getattr(state, name), wanted)
        return _apart(state)

    def returned(self, state: Any) -> None:
        """Takes note of what the step has made of the last state."""
        self._last = weakref.ref(state)
        self._leaves = [id(x) for x in jax.tree.leaves(state)]


def check_optimizer(plan: ZeroPlan, tx: optax.GradientTransformation) -> None:
    """Refuses an optimizer that keeps another state than the one planned with.

    Raises:
      ValueError: naming what differs.
    """
    found = jax.eval_shape(tx.init, plan.abstract_trained)
    check_opt_state(plan.abstract_opt_state, found, "the state of `tx`")


def _named(state: PyTree) -> list[tuple[str, Any]]:
    return [(leaf_path(p), x) for p, x in jax.tree_util.tree_leaves_with_path(state)]


def _refuse_foreign(state: PyTree) -> None:
    name, x = next((n, x) for n, x in _named(state) if not isinstance(x, jax.Array))
    raise TypeError(
        f"a step takes a state of JAX's arrays, got {type(x).__name__} at {name}. Make the"
        " state with `init_state`, or put it where the plan says with `place_state`"
    )


def _refuse_gone(state: PyTree) -> None:
    name = next(name for name, x in _named(state) if x.is_deleted())
    raise ValueError(
        f"a step takes a state that has its arrays, but {name} is gone: a state can be"
        " given to a step once. Go on with the state that the step returned"
    )


def _refuse_twice(state: PyTree) -> None:
    seen: dict[int, str] = {}
    for name, x in _named(state):
        other = seen.setdefault(id(x), name)
        if other != name:
            raise ValueError(
                f"each leaf of a state must be an array of its own, as a step gives all of"
                f" them away, but {other} and {name} are the same. Copy one of them"
                " (`jnp.copy`)"
            )


def _apart(state: PyTree) -> PyTree:
    """A state whose arrays share no memory.

    Arrays made of the same NumPy array may, which harms nothing, and so may arrays made of
    the parts of one array, which ends the process; they look the same.
    """
    seen: set[tuple[int, int]] = set()

    def own(x: jax.Array) -> jax.Array:
        places = set(_places(x))
        if places & seen:
            return jax.device_put(x, x.sharding, may_alias=False)
        seen.update(places)
        return x

    return jax.tree.map(own, state)


def _places(x: jax.Array) -> list[tuple[int, int]]:
    """Where the parts of an array lie, as far as that can be asked: device and address."""
    if not x.size or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return []
    return [
        (shard.device.id, shard.data.unsafe_buffer_pointer())
        for shard in x.addressable_shards
        if shard.device.platform == "cpu"
    ]


def _refuse_others(field: str, part: PyTree, wanted: PyTree) -> None:
    """Refuses a part of a state that is not what was planned, or lies elsewhere."""
    structures = [jax.tree.structure(tree) for tree in (wanted, part)]
    if structures[0] != structures[1]:
        raise ValueError(
            f"`{field}` of the state must have the structure that was planned for,"
            f" {structures[0]}, got {structures[1]}. Make the state and the step with the"
            " same plan and optimizer"
        )
    for (name, x), like in zip(_named(part), jax.tree.leaves(wanted), strict=True):
        where = "/".join(n for n in (field, name) if n)
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{where} of the state was planned as {like.dtype}{list(like.shape)}, got"
                f" {x.dtype}{list(x.shape)}. Plan with these parameters and this optimizer"
            )
        if not x.sharding.is_equivalent_to(like.sharding, x.ndim):
            kind = like.sharding.memory_kind
            memory = f" in {kind}" if kind == "pinned_host" else ""
            raise ValueError(
                f"{where} of the state must lie as the plan of the step says,"
                f" {like.sharding.spec}{memory} on {dict(like.sharding.mesh.shape)}, got"
                f" {x.sharding}. Make the state and the step with the same plan, or move"
                " the state with `shardjax.zero.place_state(state, plan)`"
            )

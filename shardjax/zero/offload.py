"""An optimizer's state in the host's memory, streamed through the devices by the update.

Bringing all of it to the devices at once would take more room there than never to have
taken it away: old and new state next to each other. So the layers of `blocks` are updated
one after the other in a compiled loop, which brings the state of one layer, updates the
layer and takes the state back.
"""

from typing import Any

import jax
from jaxtyping import PyTree

from shardjax.precision import choose
from shardjax.zero.piecewise import Piecewise
from shardjax.zero.plan import ZeroPlan


def find_stacks(plan: ZeroPlan) -> dict[int, list[int]]:
    """The stacked parameters of `blocks`, by their number of layers.

    Returns:
      Places among the trained parameters, for each number of layers.
    """
    stacks: dict[int, list[int]] = {}
    for i, leaf in enumerate(p for p in plan.leaves if p.trained):
        if leaf.stacked and leaf.shape[0]:
            stacks.setdefault(leaf.shape[0], []).append(i)
    return stacks


def find_others(plan: ZeroPlan) -> list[int]:
    """Places of the trained parameters that are in no stack."""
    stacked = {i for members in find_stacks(plan).values() for i in members}
    trained = sum(p.trained for p in plan.leaves)
    return [i for i in range(trained) if i not in stacked]


def only(members: list[int], values: list) -> list:
    """The list with None for all but some members."""
    return [x if i in members else None for i, x in enumerate(values)]


def init_on_host(plan: ZeroPlan, optimizer: Piecewise, params: list) -> PyTree:
    """The state of the optimizer for new parameters, made a layer at a time; inside jit.

    Args:
      plan: where all lies.
      optimizer: of the plan.
      params: those that are trained.
    """
    kept, shared = optimizer.init(only(find_others(plan), params))
    kept = _to_host(kept)

    def body(_, layers):
        kept, _ = optimizer.init(jax.tree.map(lambda x: x[None], layers))
        return None, _to_host(jax.tree.map(lambda x: x[0], kept))

    for members in find_stacks(plan).values():
        made = jax.lax.scan(body, None, only(members, params))[1]
        kept = _filled(kept, made)
    return optimizer.join(kept, shared)


def update_on_host(
    plan: ZeroPlan,
    optimizer: Piecewise,
    grads: list,
    opt_state: PyTree,
    params: list,
    finite: jax.Array | None,
) -> tuple[list, PyTree]:
    """One step of the optimizer, its state from the host and back; inside jit.

    Args:
      plan: where all lies.
      optimizer: of the plan.
      grads, params: of what is trained, split as the plan says, on the devices.
      opt_state: in the host's memory, but for what is shared.
      finite: bool [], False to leave everything as it is; None for True.

    Returns:
      The new parameters, and state where the old one lies.
    """
    kept, shared = optimizer.split(opt_state)

    def update(grads, kept, params):
        new, new_kept, new_shared = optimizer.update(grads, kept, shared, params)
        return choose(finite, (new, new_kept, new_shared), (params, kept, shared))

    def body(_, layers):
        grads, kept, params = layers
        layer = grads, jax.device_put(kept, jax.memory.Space.Device), params
        new, kept, _ = update(*jax.tree.map(lambda x: x[None], layer))
        new, kept = jax.tree.map(lambda x: x[0], (new, kept))
        return None, (new, _to_host(kept))

    others = find_others(plan)
    near = jax.device_put(only(others, kept), jax.memory.Space.Device)
    moved, new_kept, shared_after = update(
        only(others, grads), near, only(others, params)
    )
    new_kept = _to_host(new_kept)
    for members in find_stacks(plan).values():
        layers = [only(members, x) for x in (grads, kept, params)]
        new, far = jax.lax.scan(body, None, layers)[1]
        moved, new_kept = _filled(moved, new), _filled(new_kept, far)
    return moved, optimizer.join(new_kept, shared_after)


def _filled(values: list, more: list) -> list:
    return [x if y is None else y for x, y in zip(values, more, strict=True)]


def _to_host(tree: Any) -> Any:
    return jax.device_put(tree, jax.memory.Space.Host)

"""State and parameters in the host's memory, streamed through the devices by the update.

Bringing all of it to the devices at once would take more room there than never to have
taken it away: old and new state next to each other. So the layers of `blocks` are updated
one after the other in a compiled loop, which brings the state of one layer, updates the
layer and takes the state back. Parameters that lie there come and go with their state.
"""

import jax
from jaxtyping import PyTree

from shardjax.precision import choose
from shardjax.sharded import Part, PartSpec, to_device, to_host
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
      params: those that are trained, where they lie between steps.
    """
    kept, shared = optimizer.init(to_device(only(find_others(plan), params)))
    kept = to_host(kept)

    def body(_, layers):
        kept, _ = optimizer.init(jax.tree.map(lambda x: x[None], to_device(layers)))
        return None, to_host(jax.tree.map(lambda x: x[0], kept))

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
      grads: of what is trained, split as the plan says, on the devices.
      params: those that are trained, split so, where they lie between steps.
      opt_state: in the host's memory, but for what is shared.
      finite: bool [], False to leave everything as it is; None for True.

    Returns:
      The new parameters and state, where the old ones lie.
    """
    kept, shared = optimizer.split(opt_state)
    params_far = plan.offload == "all"

    def near(params):
        return to_device(params) if params_far else params

    def back(params):
        return to_host(params) if params_far else params

    def update(grads, kept, params):
        new, new_kept, new_shared = optimizer.update(grads, kept, shared, params)
        return choose(finite, (new, new_kept, new_shared), (params, kept, shared))

    def body(_, layers):
        grads, kept, params = layers
        layer = grads, to_device(kept), near(params)
        new, kept, _ = update(*jax.tree.map(lambda x: x[None], layer))
        new, kept = jax.tree.map(lambda x: x[0], (new, kept))
        return None, (back(new), to_host(kept))

    others = find_others(plan)
    moved, new_kept, shared_after = update(
        only(others, grads), to_device(only(others, kept)), near(only(others, params))
    )
    moved, new_kept = back(moved), to_host(new_kept)
    for members in find_stacks(plan).values():
        layers = [only(members, x) for x in (grads, kept, params)]
        new, far = jax.lax.scan(body, None, layers)[1]
        moved, new_kept = _filled(moved, new), _filled(new_kept, far)
    return moved, optimizer.join(new_kept, shared_after)


def scale_gradients(plan: ZeroPlan, grads: list, factor: jax.Array) -> list:
    """Gradients times a number, inside jit.

    Of parameters that stream they are multiplied a layer at a time, in place: TPUs'
    compiler keeps a second copy of what is multiplied at once.

    Args:
      plan: where all lies.
      grads: one per parameter, None for what is not trained.
      factor: float32 [].
    """

    def one(leaf, grad):
        if grad is None:
            return None
        scale = factor.astype(grad.dtype)
        if not leaf.streamed:
            return grad * scale

        def body(i, grad):
            layer = jax.lax.dynamic_index_in_dim(grad, i)
            return jax.lax.dynamic_update_index_in_dim(grad, layer * scale, i, 0)

        return jax.lax.fori_loop(0, leaf.shape[0], body, grad)

    return [one(p, g) for p, g in zip(plan.leaves, grads, strict=True)]


def params_for_evaluation(plan: ZeroPlan, params: PyTree) -> PyTree:
    """Parameters for a loss that nothing is differentiated by; inside jit.

    The compiler splits the work: not for `jax.shard_map`.

    Args:
      plan: where all lies.
      params: between steps.

    Returns:
      Parameters in the dtype to compute in. Those of `blocks` in the host's memory come in
      parts, which the layers bring to the devices by `shardjax.gather`; others that lie
      there are brought.

    Example:
      >>> import numpy as np, optax, shardjax as sj
      >>> from shardjax import zero
      >>> params, tx = {"w": np.ones((2, 3), np.float32)}, optax.adam(1e-3)
      >>> plan = zero.plan_zero(params, tx, sj.make_mesh("1x1"), 3, offload="all")
      >>> state = zero.init_state(params, tx, plan)
      >>> total = jax.jit(lambda p: params_for_evaluation(plan, p)["w"].sum())
      >>> float(total(state.params))
      6.0
    """
    compute = plan.precision.compute

    def one(leaf, x):
        if leaf.streamed:
            return Part(x, PartSpec(None, (), dtype=compute))
        x = to_device(x) if leaf.on_host else x
        return x.astype(compute) if leaf.trained and compute is not None else x

    leaves = zip(plan.leaves, jax.tree.leaves(params), strict=True)
    return plan.tree(one(leaf, x) for leaf, x in leaves)


def _filled(values: list, more: list) -> list:
    return [x if y is None else y for x, y in zip(values, more, strict=True)]

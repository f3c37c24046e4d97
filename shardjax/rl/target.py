"""Target networks: a copy of the parameters that follows them, all at once or slowly.

Q-learning regresses a network on its own predictions; those come from a copy that stands
still (`HardCopy`, Mnih et al. 2015) or lags behind (`Polyak`, Lillicrap et al. 2016)::

    target = init_target(params, rule)
    ...                                       # inside the jitted step, after the update:
    target = apply_target(rule, params, target, step)

The target is a pytree like the parameters, each leaf where its parameter lies. What went
wrong elsewhere, and how it is kept from happening here:

* A target that is the same arrays as the parameters ends a program that donates both
  (flax #5461, optax #1059): `init_target` and copies make arrays of their own.
* A hard copy written as an average with weight 1 keeps a NaN of the old target, as 0 * NaN
  is NaN: `HardCopy` does not read the old target.
* An average in bfloat16 stands still once its steps are below half a unit in the last place
  (at tau 0.005 at once): `Polyak` keeps at least float32, whatever the parameters are.
* Counters and PRNG keys have no average: leaves that are no floats are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from shardjax.partition import leaf_path


@dataclass(frozen=True)
class HardCopy:
    """The target is the parameters as they were at the last step that `every` divides.

    Attributes:
      every: steps from one copy to the next.
    """

    every: int

    def __post_init__(self):
        if isinstance(self.every, bool) or not isinstance(self.every, int | np.integer):
            raise TypeError(
                f"`every` must be a number of steps, got {self.every!r}. Give an int"
            )
        if self.every < 1:
            raise ValueError(f"`every` must be at least 1 step, got {self.every}")


@dataclass(frozen=True)
class Polyak:
    """The target moves by the share `tau` of its distance to the parameters, each step.

    To average each k steps only is to have a larger share: k steps of tau are one of
    1 - (1 - tau) ** k.

    Averages are kept in float32 or wider. A NaN in an average stays there.

    Attributes:
      tau: in (0, 1).
    """

    tau: float

    def __post_init__(self):
        if not 0 < self.tau < 1:
            fix = ". A target that equals the parameters is HardCopy(1)"
            raise ValueError(
                f"`tau` must be in (0, 1), got {self.tau}{fix if self.tau == 1 else ''}"
            )


TargetRule = HardCopy | Polyak


def check_rule(rule: Any) -> None:
    """Refuses what is no rule.

    Raises:
      TypeError: naming the two there are.
    """
    if not isinstance(rule, HardCopy | Polyak):
        raise TypeError(
            f"the rule of a target must be HardCopy(every) or Polyak(tau), got {rule!r}"
        )


def target_dtype(rule: TargetRule, dtype: Any) -> Any:
    """The dtype of a target's leaf, of a parameter's dtype."""
    if isinstance(rule, Polyak) and jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return dtype


def init_target(params: PyTree, rule: TargetRule) -> PyTree:
    """The target before the first step: the parameters, in arrays of their own.

    Args:
      params: any pytree of arrays with any sharding; inside or outside of jit.
      rule: that the target is to follow.

    Returns:
      A tree like `params`, each leaf with the sharding of its parameter. For `Polyak` its
      floats are float32 at least.

    Example:
      >>> params = {"w": jnp.ones(2, jnp.bfloat16), "seen": jnp.int32(3)}
      >>> target = init_target(params, Polyak(0.005))
      >>> target["w"].dtype, target["seen"] is params["seen"]
      (dtype('float32'), False)
    """
    check_rule(rule)

    def own(x):
        dtype = target_dtype(rule, x.dtype)
        if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
            return jnp.array(x, dtype)
        if dtype != x.dtype:
            return jax.device_put(x.astype(dtype), x.sharding)
        return jax.device_put(x, x.sharding, may_alias=False)

    return jax.tree.map(own, params)


def apply_target(
    rule: TargetRule, params: PyTree, target: PyTree, step: jax.Array | int
) -> PyTree:
    """The target after a step; inside jit.

    A hard copy that is not due costs nothing, where the target is donated to the jit.

    Args:
      rule: as of `init_target`.
      params: after the step.
      target: before it.
      step: int [], steps taken with this one; the parameters are copied if `HardCopy.every`
        divides it.

    Raises:
      ValueError: if the target is not one of such parameters.

    Example:
      >>> params, target = {"w": jnp.ones(2)}, {"w": jnp.full(2, jnp.nan)}
      >>> apply_target(HardCopy(10), params, target, 20)["w"].tolist()
      [1.0, 1.0]
    """
    check_rule(rule)
    _check_alike(rule, params, target)
    if isinstance(rule, Polyak):
        return jax.tree.map(partial(_average, rule.tau), params, target)
    return jax.lax.cond(
        jnp.asarray(step) % rule.every == 0,
        lambda p, t: jax.tree.map(jnp.copy, p),
        lambda p, t: t,
        params,
        target,
    )


def make_target_step(
    rule: TargetRule,
) -> Callable[[PyTree, PyTree, int], PyTree]:
    """Makes what moves a target outside of jit, for loops whose step knows of none.

    Args:
      rule: as of `init_target`.

    Returns:
      `target_step(params, target, step) -> target`, with `step` an int, the steps taken.
      When nothing is due it returns the target as it is. Otherwise the target is donated:
      the new one is in its memory, and each leaf keeps its sharding.

    Example:
      >>> params = {"w": jnp.ones(2)}
      >>> target_step = make_target_step(HardCopy(10))
      >>> target = init_target(params, HardCopy(10))
      >>> target_step(params, target, 9) is target
      True
    """
    check_rule(rule)

    # keep_unused: the memory of an old target that is not read is still the new one's
    @partial(
        jax.jit, donate_argnums=1, keep_unused=True, static_argnames=("shardings",)
    )
    def move(params, target, *, shardings):
        if isinstance(rule, Polyak):
            new = jax.tree.map(partial(_average, rule.tau), params, target)
        else:
            new = jax.tree.map(jnp.copy, params)
        placed = [
            jax.lax.with_sharding_constraint(x, sharding)
            for x, sharding in zip(jax.tree.leaves(new), shardings, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(new), placed)

    def target_step(params: PyTree, target: PyTree, step: int) -> PyTree:
        if isinstance(step, jax.Array):
            raise TypeError(
                "`step` must be a number of the host, which decides whether a copy is due,"
                f" got {step}. Inside jit call `apply_target`; outside give int(step)"
            )
        if isinstance(rule, HardCopy) and step % rule.every:
            return target
        _check_alike(rule, params, target)
        _check_apart(params, target)
        return move(
            params, target, shardings=tuple(x.sharding for x in jax.tree.leaves(target))
        )

    return target_step


def as_params(target: PyTree, params: PyTree) -> PyTree:
    """A target in the dtypes of the parameters, to compute with; inside or outside of jit.

    Args:
      target: of `init_target`.
      params: or their shapes.

    Example:
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> as_params(init_target(params, Polyak(0.005)), params)["w"].dtype
      dtype(bfloat16)
    """

    def cast(t, p):
        return t if t.dtype == p.dtype else t.astype(p.dtype)

    return jax.tree.map(cast, target, params)


def _average(tau: float, p: jax.Array, t: jax.Array) -> jax.Array:
    if not jnp.issubdtype(t.dtype, jnp.inexact):
        return jnp.copy(p)
    return t + tau * (p.astype(t.dtype) - t)


def _check_alike(rule: TargetRule, params: PyTree, target: PyTree) -> None:
    structures = jax.tree.structure(params), jax.tree.structure(target)
    if structures[0] != structures[1]:
        raise ValueError(
            f"the target must have the structure of the parameters, {structures[0]}, got"
            f" {structures[1]}. Make it with `init_target(params, rule)`"
        )
    lines = []
    named = jax.tree_util.tree_leaves_with_path(params)
    for (path, p), t in zip(named, jax.tree.leaves(target), strict=True):
        wanted = target_dtype(rule, p.dtype)
        if (t.shape, t.dtype) != (p.shape, wanted):
            lines.append(
                f"\n  - {leaf_path(path)}: {wanted}{list(p.shape)}, got"
                f" {t.dtype}{list(t.shape)}"
            )
    if lines:
        raise ValueError(
            f"the target must be one of these parameters for {rule}, but it differs:"
            f"{''.join(lines)}\nMake it with `init_target(params, rule)`"
        )


def _check_apart(params: PyTree, target: PyTree) -> None:
    """Refuses a target that is donated with an array of the parameters in it."""
    own = {id(x) for x in jax.tree.leaves(params)}
    for path, t in jax.tree_util.tree_leaves_with_path(target):
        if id(t) in own:
            raise ValueError(
                f"the target must have arrays of its own, as its memory is used again, but"
                f" {leaf_path(path)} is the parameters'. Make it with"
                " `init_target(params, rule)`"
            )

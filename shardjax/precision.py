"""Mixed precision: dtypes to store, compute and reduce in, and scaling of float16 losses.

Numbers of few bits have two troubles. Small updates vanish when added to large numbers, so
parameters are kept in float32 and cast to what is computed in (or kept by `with_master`).
And float16 gradients underflow, so the loss is multiplied by a scale before they are taken
and they are divided by it after; where one overflows, the step is skipped and the scale
halved (Micikevicius et al. 2018). bfloat16 has the range of float32 and needs no scale.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

_FLOATS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


@dataclass(frozen=True)
class LossScaling:
    """How the scale of the loss is found.

    Attributes:
      initial: the first scale.
      growth_interval: steps without overflow after which the scale doubles.
      smallest, largest: bounds of the scale.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self):
        if not 0 < self.smallest <= self.initial <= self.largest:
            raise ValueError(
                "a loss scale must keep 0 < smallest <= initial <= largest, got"
                f" smallest {self.smallest}, initial {self.initial}, largest"
                f" {self.largest}"
            )
        if self.growth_interval < 1:
            raise ValueError(
                f"`growth_interval` must be positive, got {self.growth_interval}"
            )


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training step.

    Attributes:
      compute: what parameters are cast to for the loss, None for as they are. Parts of
        sharded parameters are cast before they are gathered.
      reduce: what gradients are summed over devices in, None for the parameters' dtype.
      scaling: of the loss; float16 needs it.

    Example:
      >>> Precision.parse("bf16").compute.__name__
      'bfloat16'
    """

    compute: Any = None
    reduce: Any = None
    scaling: LossScaling | None = None

    def __post_init__(self):
        for name in ("compute", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"`{name}` must be a floating dtype, got {dtype}")
        if self.compute is not None and jnp.dtype(self.compute) == jnp.float16:
            if self.scaling is None:
                raise ValueError(
                    "`compute` float16 needs a scaled loss, as small gradients are zero in"
                    " it, got scaling=None. Give scaling=LossScaling(), or compute in"
                    " bfloat16"
                )

    def cast(self, tree: PyTree) -> PyTree:
        """A tree of float arrays in the dtype to compute in."""
        if self.compute is None:
            return tree
        return jax.tree.map(lambda x: x.astype(self.compute), tree)

    @classmethod
    def parse(cls, text: "str | Precision") -> "Precision":
        """Reads a name: "f32", "bf16", or "f16" with a scaled loss.

        Raises:
          ValueError: for any other.
        """
        if isinstance(text, Precision):
            return text
        if text not in _FLOATS:
            raise ValueError(
                f"`precision` must be one of {list(_FLOATS)} or a Precision, got {text!r}"
            )
        if text == "f32":
            return cls()
        return cls(_FLOATS[text], None, LossScaling() if text == "f16" else None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The scale of a loss; part of the state of a run."""

    scale: jax.Array  # float32 []
    good_steps: jax.Array  # int32 [], since it last changed
    skipped: jax.Array  # int32 [], steps in all


def init_scale(scaling: LossScaling | None) -> LossScale | None:
    """The scale before the first step; None where the loss is not scaled."""
    if scaling is None:
        return None
    zero = jnp.zeros([], jnp.int32)
    return LossScale(jnp.float32(scaling.initial), zero, zero)


def next_scale(scaling: LossScaling, state: LossScale, finite: jax.Array) -> LossScale:
    """The scale after a step.

    Args:
      scaling: its rules.
      state: before the step.
      finite: bool [], whether all gradients were, on all devices.
    """
    good = jnp.where(finite, state.good_steps + 1, 0)
    grows = good >= scaling.growth_interval
    scale = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5) * state.scale
    return LossScale(
        jnp.clip(scale, scaling.smallest, scaling.largest),
        jnp.where(grows, 0, good),
        state.skipped + jnp.where(finite, 0, 1),
    )


def all_finite(tree: PyTree) -> jax.Array:
    """bool [], whether every number of a tree of floats is finite.

    Example:
      >>> bool(all_finite([jnp.ones(2), jnp.array([jnp.inf])]))
      False
    """
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.array(True)


def choose(finite: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    """The new values, or the old ones where gradients were not finite.

    Args:
      finite: bool []; None for True.
      new, old: of the same structure.

    Example:
      >>> choose(jnp.array(False), {"a": jnp.ones(2)}, {"a": jnp.zeros(2)})["a"].tolist()
      [0.0, 0.0]
    """
    if finite is None:
        return new
    return jax.tree.map(partial(jnp.where, finite), new, old)


class MasterState(NamedTuple):
    """State of `with_master`."""

    master: Any  # like params, float32
    inner: Any  # the optimizer's


def with_master(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that keeps float32 copies of parameters of few bits.

    For parameters in bfloat16 or float16: gradients are cast to float32, `tx` moves the
    copies, and the parameters are the copies rounded. As the copies are the optimizer's
    state, ZeRO splits them from stage 1 on: 2 + 2 + 12 bytes per parameter with Adam, the
    paper's mixed precision.

    Args:
      tx: any optax transformation.

    Example:
      >>> tx = with_master(optax.sgd(0.25))
      >>> params = jnp.ones(3, jnp.bfloat16)
      >>> updates, state = tx.update(params * 2**-8, tx.init(params), params)
      >>> optax.apply_updates(params, updates)[0], float(state.master[0])
      (Array(1, dtype=bfloat16), 0.9990234375)
    """

    def to_float(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params):
        master = to_float(params)
        return MasterState(master, tx.init(master))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "with_master needs the parameters: update(grads, state, params)"
            )
        updates, inner = tx.update(to_float(updates), state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        # in float32, so that adding it to a parameter gives the rounded copy
        change = jax.tree.map(lambda m, p: m - p.astype(jnp.float32), master, params)
        return change, MasterState(master, inner)

    return optax.GradientTransformation(init, update)

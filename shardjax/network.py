"""A user's Flax module as a pure function and two pytrees.

A model is called as ``model(dense, embeddings)`` and returns logits [batch]. Parameters
are what the optimizer moves; everything else a module holds (batch statistics, dropout
keys) is its state, which the training step threads through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx

Apply = Callable[..., tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Network:
    """A model as data.

    Attributes:
      apply: `apply(params, state, dense, embeddings, train=...) -> (logits, state)`,
        pure. dense: float32 [batch, n_dense]; embeddings: by feature, [batch, dim] or
        `shardjax.embed.Sequence`; logits: [batch].
      params: pytree of what is trained.
      state: pytree of what is not.
    """

    apply: Apply
    params: Any
    state: Any


def from_nnx(module: nnx.Module) -> Network:
    """The network of an nnx module; the module itself is not changed by training.

    Example:
      >>> class Model(nnx.Module):
      ...   def __init__(self, rngs):
      ...     self.out = nnx.Linear(3, 1, rngs=rngs)
      ...   def __call__(self, dense, embeddings):
      ...     return self.out(dense)[:, 0]
      >>> network = from_nnx(Model(nnx.Rngs(0)))
      >>> logits, _ = network.apply(
      ...   network.params, network.state, jax.numpy.ones((2, 3)), {}, train=True)
      >>> logits.shape
      (2,)
    """
    graphs = {}
    for train in (False, True):
        module.train() if train else module.eval()
        graphs[train], params, state = nnx.split(module, nnx.Param, ...)

    def apply(params, state, dense, embeddings, *, train):
        live = nnx.merge(graphs[train], params, state)
        logits = live(dense, embeddings)
        _, _, state = nnx.split(live, nnx.Param, ...)
        return logits, state

    return Network(apply, params, state)


def from_linen(
    module: linen.Module,
    variables: Mapping[str, Any],
    train_argument: str | None = None,
) -> Network:
    """The network of a linen module and its variables (of `module.init`).

    Args:
      module: the module.
      variables: collections by name; "params" is trained, the others are state and
        mutable while training.
      train_argument: keyword by which the module is told whether it trains, if any.

    Raises:
      ValueError: where there are no "params".
    """
    if "params" not in variables:
        raise ValueError(
            f"`variables` must have the collection 'params', got {list(variables)}: pass"
            " what module.init returned"
        )
    state = {k: v for k, v in variables.items() if k != "params"}

    def apply(params, state, dense, embeddings, *, train):
        more = {} if train_argument is None else {train_argument: train}
        variables = {"params": params, **state}
        if train and state:
            logits, changed = module.apply(
                variables, dense, embeddings, mutable=list(state), **more
            )
            return logits, {**state, **changed}
        return module.apply(variables, dense, embeddings, **more), state

    return Network(apply, linen.meta.unbox(variables["params"]), state)


def as_network(model: nnx.Module | Network) -> Network:
    """`model` as a network.

    Raises:
      TypeError: for anything but an nnx module or a `Network`.
    """
    if isinstance(model, Network):
        return model
    if isinstance(model, nnx.Module):
        return from_nnx(model)
    hint = (
        " Wrap a linen module: from_linen(module, module.init(...))."
        if isinstance(model, linen.Module)
        else ""
    )
    raise TypeError(f"`model` must be an nnx.Module or a Network, got {model!r}.{hint}")

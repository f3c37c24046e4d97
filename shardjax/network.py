"""A user's Flax module as a pure function and two pytrees.

A model is called as ``model(dense, embeddings)`` and returns logits [batch]. Parameters
are what the optimizer moves; everything else a module holds (batch statistics, dropout
keys) is its state, which the training step threads through.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from shardjax.partition import leaf_path

Apply = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Network:
    """A model as data.

    Attributes:
      apply: `apply(params, state, dense, embeddings, train=...) -> (logits, state)`,
        pure. dense: float32 [batch, n_dense]; embeddings: by feature, [batch, dim] or
        `shardjax.embed.Sequence`; logits: [batch], or what the `Objective` of
        `shardjax.make_train_step` takes.
      params: pytree of what is trained.
      state: pytree of what is not.
    """

    apply: Apply
    params: Any
    state: Any


def finish_logits(logits: jax.Array, examples: int) -> jax.Array:
    """What a model returned as float32 [batch].

    Args:
      logits: [batch], or [batch, 1].
      examples: how many there have to be.

    Raises:
      TypeError: for something else than an array of floats.
      ValueError: for another shape.
    """
    dtype = getattr(logits, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            "the model must return logits, an array of floats [batch], got"
            f" {dtype or type(logits).__name__}. Return log-odds: no class numbers, and"
            " nothing beside them"
        )
    if logits.shape == (examples, 1):
        logits = logits[:, 0]
    if logits.shape != (examples,):
        raise ValueError(
            f"the model must return logits of shape [batch] = ({examples},), the examples of"
            f" a device, got {logits.shape}"
        )
    return logits.astype(jnp.float32)


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
    module = nnx.clone(module)
    graphs = {}
    for train in (False, True):
        module.train() if train else module.eval()
        graphs[train], params, state = nnx.split(module, nnx.Param, ...)

    def apply(params, state, dense, embeddings, *, train):
        # a copy: a module writes into the variables that it is made of
        live = nnx.merge(graphs[train], params, state, copy=True)
        logits = live(dense, embeddings)
        _, _, state = nnx.split(live, nnx.Param, ...)
        return logits, state

    return Network(apply, params, state)


def from_linen(
    module: linen.Module,
    variables: Mapping[str, Any],
    train_argument: str | None = None,
    rngs: Mapping[str, jax.Array] | None = None,
) -> Network:
    """The network of a linen module and its variables (of `module.init`).

    Args:
      module: the module.
      variables: collections by name; "params" is trained, the others are state and
        mutable while training.
      train_argument: keyword by which the module is told whether it trains, if any.
      rngs: PRNG keys (of `jax.random.key`) that the module uses while training, by name:
        `{"dropout": key}`. Every step and device gets its own.

    Raises:
      ValueError: where there are no "params".
      TypeError: for a key of the old style, `jax.random.PRNGKey`.

    Example:
      >>> class Model(linen.Module):
      ...   @linen.compact
      ...   def __call__(self, dense, embeddings):
      ...     return linen.Dense(1)(dense)[:, 0]
      >>> model, dense = Model(), jax.numpy.ones((2, 3))
      >>> network = from_linen(model, model.init(jax.random.key(0), dense, {}))
      >>> logits, _ = network.apply(
      ...   network.params, network.state, dense, {}, train=True)
      >>> logits.shape
      (2,)
    """
    if "params" not in variables:
        raise ValueError(
            f"`variables` must have the collection 'params', got {list(variables)}: pass"
            " what module.init returned"
        )
    for name, key in (rngs or {}).items():
        if not jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"the key {name!r} of `rngs` must be one of jax.random.key, got an array"
                f" of {key.dtype}. Use jax.random.key, or jax.random.wrap_key_data"
            )
    collections: dict[str, Any] = linen.meta.unbox(dict(variables))
    params = collections.pop("params")
    state: dict[str, Any] = {"collections": collections}
    if rngs:
        state |= {"rngs": dict(rngs), "count": jax.numpy.zeros([], jax.numpy.uint32)}

    def apply(params, state, dense, embeddings, *, train):
        more = {} if train_argument is None else {train_argument: train}
        collections = state["collections"]
        variables = {"params": params, **collections}
        if not train:
            logits: Any = module.apply(variables, dense, embeddings, **more)
            return logits, state
        if "rngs" in state:
            count = state["count"]
            keys = {k: jax.random.fold_in(v, count) for k, v in state["rngs"].items()}
            state = {**state, "count": count + 1}
            more["rngs"] = keys
        logits, changed = module.apply(  # pyright: ignore[reportGeneralTypeIssues]
            variables, dense, embeddings, mutable=list(collections), **more
        )
        return logits, {**state, "collections": {**collections, **changed}}

    return Network(apply, params, state)


def flax_rules(
    params: Any, names: Mapping[str, str | tuple[str, ...] | None] | None = None
) -> list[tuple[str, jax.P]]:
    """Rules of tensor parallelism from what flax modules say of their parameters.

    Args:
      params: with the annotations of `nnx.with_partitioning` or `linen.with_partitioning`
        (boxed, as of `module.init`).
      names: mesh axes by the names that the annotations use, None for no axis; for names
        that are mesh axes themselves, nothing.

    Returns:
      A rule per annotated parameter, for `plan_zero` and `match_specs`, by its path in
      the tree without boxes. Parameters without an annotation have none.

    Raises:
      ValueError: for an annotation with a name that `names` lacks, if `names` is given.

    Example:
      >>> init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "hidden"))
      >>> with nnx.use_eager_sharding(False):
      ...   layer = nnx.Linear(3, 8, kernel_init=init, rngs=nnx.Rngs(0))
      >>> flax_rules(nnx.state(layer), {"hidden": "model"})
      [('^kernel(/|$)', P(None, 'model'))]
    """

    def axis_of(path: str, name):
        if names is None or name is None:
            return name
        if name not in names:
            raise ValueError(
                f"{path} is annotated with {name!r}, which `names` has no mesh axis for;"
                f" it has {list(names)}. Add {name!r}: an axis of the mesh, or None"
            )
        return names[name]

    def is_box(x):
        return isinstance(x, nnx.Variable | linen.meta.AxisMetadata)

    rules = []
    for keys, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box):
        if (annotated := _annotation(x)) is not None:
            path = leaf_path(keys)
            spec = jax.P(*(axis_of(path, name) for name in annotated))
            rules.append((f"^{re.escape(path)}(/|$)", spec))
    return rules


def _annotation(x: Any) -> tuple | None:
    """What flax says of the dims of a parameter, None for nothing."""
    if isinstance(x, linen.Partitioned):
        return tuple(x.names)
    if not isinstance(x, nnx.Variable):
        return None
    names = x.get_metadata().get("out_sharding")
    return None if names is None else tuple(names)


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

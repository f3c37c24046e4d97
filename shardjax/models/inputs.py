"""Checks what a model was built with and what it is called with."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def check_arguments(
    model: str, features: Sequence[str], n_dense: int, dim: int
) -> tuple[str, ...]:
    """Checks the arguments that all models share.

    Args:
      model: name of the model, for errors.
      features: names of the features the model uses, in order.
      n_dense: number of dense features.
      dim: width of the vectors.

    Returns:
      `features` as a tuple.

    Raises:
      TypeError: if `features` is a single string.
      ValueError: if a name repeats, a size is out of range or there is no input at all.

    Example:
      >>> check_arguments("DLRM", ["user", "item"], n_dense=0, dim=16)
      ('user', 'item')
    """
    if isinstance(features, str):
        raise TypeError(
            f"`features` of {model} must be a sequence of names, got the string"
            f" {features!r}. Write features=({features!r},)."
        )
    features = tuple(features)
    if repeated := sorted({name for name in features if features.count(name) > 1}):
        raise ValueError(
            f"`features` of {model} must not repeat, got {repeated} more than once."
            " Name each feature once."
        )
    if n_dense < 0:
        raise ValueError(
            f"`n_dense` of {model} must not be negative, got {n_dense}. Give 0 for no"
            " dense features."
        )
    if dim < 1:
        raise ValueError(
            f"`dim` of {model} must be positive, got {dim}. Give for example 16."
        )
    if not features and n_dense == 0:
        raise ValueError(
            f"{model} must have an input, got no `features` and `n_dense` 0. Name at"
            " least one feature."
        )
    return features


def stack_rows(
    model: str,
    features: tuple[str, ...],
    n_dense: int,
    width: int,
    dense: Float[Array, "batch n_dense"],
    embeddings: Mapping[str, Float[Array, "batch width"]],
) -> Float[Array, "batch features width"]:
    """Checks the inputs of a model and stacks its features in their fixed order.

    Args:
      model: name of the model, for errors.
      features: names of the features the model uses, in order.
      n_dense: number of dense features the model was built for.
      width: floats per row the model was built for.
      dense: the dense features of a batch.
      embeddings: pooled rows by feature.

    Returns:
      The rows, one after the other in the order of `features`.

    Raises:
      TypeError: if a feature is a padded sequence and not pooled.
      ValueError: if a feature is missing or unknown, or a shape does not fit.

    Example:
      >>> rows = {"b": jnp.ones((2, 3)), "a": jnp.zeros((2, 3))}
      >>> stack_rows("DLRM", ("a", "b"), 0, 3, jnp.ones((2, 0)), rows).shape
      (2, 2, 3)
    """
    if dense.ndim != 2 or dense.shape[1] != n_dense:
        raise ValueError(
            f"`dense` of {model} must have shape [batch, {n_dense}] (its `n_dense`),"
            f" got {tuple(dense.shape)}. Build the model with the n_dense of the data."
        )
    missing = [name for name in features if name not in embeddings]
    unknown = [name for name in embeddings if name not in features]
    if missing or unknown:
        raise ValueError(
            f"`embeddings` of {model} must have exactly its features, got"
            f" {sorted(embeddings)}: missing {missing}, unknown {unknown}. Build the"
            " model with the features of the collection, or pass only those it uses."
        )
    batch = dense.shape[0]
    for name in features:
        rows = embeddings[name]
        if not hasattr(rows, "ndim"):
            raise TypeError(
                f"feature {name!r} of {model} must be pooled to [batch, {width}], got a"
                f" {type(rows).__name__}. Give it the combiner 'sum', 'mean' or"
                " 'sqrtn', or pool it in a model of your own."
            )
        if tuple(rows.shape) != (batch, width):
            raise ValueError(
                f"feature {name!r} of {model} must have shape [{batch}, {width}]"
                f" (batch, row_dim), got {tuple(rows.shape)}. Give its table"
                f" dim={width}."
            )
    if not features:
        return jnp.zeros((batch, 0, width), dense.dtype)
    return jnp.stack([embeddings[name] for name in features], axis=1)

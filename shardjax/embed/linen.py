"""Flax (linen) modules whose tables a model looks up itself, with ids inside of jit.

They take the place of `flax.linen.Embed` as those of `shardjax.embed.module` do that of
`nnx.Embed`.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from shardjax.embed.in_graph import (
    TableHandle,
    check_bad_ids,
    check_combiner,
    lookup,
    pool,
)


class Embed(nn.Embed):
    """Rows of a table by id, in the place of `flax.linen.Embed`.

    Ids outside of [0, num_embeddings) read NaN, also negative ones.

    Attributes:
      padding_id: reads zeros and trains nothing; any integer.
      bad_ids: what other ids outside of the table read: "nan" or "zero".
      sparse: whether `table_paths` names its table; False for small tables and `attend`.

    Example:
      >>> layer = Embed(5, 3, padding_id=-1)
      >>> ids = jax.numpy.array([4, -1, 5])
      >>> layer.apply(layer.init(jax.random.key(0), ids), ids)[1:]
      Array([[ 0.,  0.,  0.],
             [nan, nan, nan]], dtype=float32)
    """

    padding_id: int | None = None
    bad_ids: str = "nan"
    sparse: bool = True

    def setup(self):
        """Makes the table, or takes what stands for it in a training step."""
        check_bad_ids(self.bad_ids)
        found = (
            self.get_variable("params", "embedding")
            if self.has_variable("params", "embedding")
            else None
        )
        if isinstance(found, TableHandle):  # which has not the shape of a table
            self.embedding = found
        else:
            super().setup()

    def __call__(self, inputs) -> jax.Array:
        """Reads rows.

        Args:
          inputs: any integers, [...].

        Returns:
          [..., features].

        Raises:
          ValueError: for ids that are no integers.
        """
        table: Any = self.embedding
        rows = lookup(table, inputs, padding_id=self.padding_id, bad_ids=self.bad_ids)
        promote: Any = self.promote_dtype
        (rows,) = promote(rows, dtype=self.dtype, inexact=False)
        return rows


class EmbeddingBag(Embed):
    """A vector for each bag of ids: their rows, weighted and pooled.

    Attributes:
      combiner: "sum", "mean" or "sqrtn".

    Example:
      >>> layer = EmbeddingBag(5, 3, combiner="mean", padding_id=-1)
      >>> ids = jax.numpy.array([[1, 2, -1], [-1, -1, -1]])
      >>> layer.apply(layer.init(jax.random.key(0), ids), ids).shape
      (2, 3)
    """

    combiner: str = "sum"

    def __call__(self, inputs, weights=None) -> jax.Array:
        """Pools the rows of bags.

        Args:
          inputs: any integers, [..., ids]; shorter bags are filled with `padding_id`.
          weights: floats like the ids, None for all one.

        Returns:
          [..., features]; zeros of an empty bag.

        Raises:
          ValueError: for weights of another shape.
        """
        check_combiner(self.combiner)
        rows = super().__call__(inputs)
        return pool(rows, inputs, weights, self.combiner, self.padding_id)


def table_paths(module: nn.Module, *args, **kwargs) -> tuple[str, ...]:
    """Paths of the tables among the parameters of a model, for `plan_tables`.

    Args:
      module: the model.
      *args, **kwargs: what it is initialized with, after the keys; arrays or shapes.

    Example:
      >>> class Model(nn.Module):
      ...   @nn.compact
      ...   def __call__(self, ids):
      ...     return Embed(5, 3, name="item")(ids) + Embed(9, 3, sparse=False)(ids)
      >>> table_paths(Model(), jax.ShapeDtypeStruct((2,), "int32"))
      ('item/embedding',)
    """
    found: dict[str, None] = {}

    def note(method: Callable[..., Any], args, kwargs, context):
        module = context.module
        if isinstance(module, Embed) and module.sparse:
            found["/".join((*module.path, "embedding"))] = None
        return method(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(lambda *a: module.init(jax.random.key(0), *a, **kwargs), *args)
    return tuple(found)

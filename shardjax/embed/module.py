"""Flax (nnx) modules whose tables a model looks up itself, with ids inside of jit.

They take the place of `nnx.Embed`: the same arguments, the same initial values, the same
results. What is gained is in training: `plan_tables` with `table_paths(model)` trains only
the rows that a step looks up, split over the devices of a mesh. In a loop that knows
nothing of this they train as `nnx.Embed` does.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_embed_init

from shardjax.embed.in_graph import check_bad_ids, check_combiner, lookup, pool
from shardjax.partition import leaf_path


class Table(nnx.Param):
    """A parameter [..., rows, dim] of which a training step moves only some rows.

    It is an `nnx.Param`, so that no loop leaves it untrained by mistake.
    """


class Embed(nnx.Embed):
    """Rows of a table by id, in the place of `nnx.Embed`.

    Ids outside of [0, num_embeddings) are never silent: they read NaN, also negative ones,
    which `nnx.Embed` counts from the end; also of a table of one row. Training steps count
    them. `padding_id` is for what means no id.

    Example:
      >>> layer = Embed(5, 3, padding_id=-1, rngs=nnx.Rngs(0))
      >>> jnp.isnan(layer(jnp.array([4, -1, 5]))).any(1)
      Array([False, False,  True], dtype=bool)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Any = default_embed_init,
        promote_dtype: Any = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
        padding_id: int | None = None,
        bad_ids: str = "nan",
        sparse: bool = True,
    ):
        """Makes the table.

        Args:
          num_embeddings: rows.
          features: numbers per row.
          dtype: of what is returned, None for that of the table.
          param_dtype: of the table.
          embedding_init: its initializer.
          promote_dtype: casts rows to `dtype`.
          rngs: where its first values come from.
          embedding_metadata: of its variable.
          padding_id: reads zeros and trains nothing; any integer.
          bad_ids: what other ids outside of the table read: "nan" or "zero".
          sparse: whether it is a `Table`; False for a parameter that the optimizer of the
            others trains, as a whole: for small tables, and for `attend`.

        Raises:
          ValueError: for another word for `bad_ids`.
        """
        check_bad_ids(bad_ids)
        super().__init__(
            num_embeddings,
            features,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=embedding_init,
            promote_dtype=promote_dtype,
            rngs=rngs,
            embedding_metadata=embedding_metadata,
        )
        if sparse:
            self.embedding = Table(self.embedding.get_value(), **embedding_metadata)
        self.padding_id, self.bad_ids, self.sparse = padding_id, bad_ids, sparse

    def __call__(self, inputs, out_sharding: Any = None) -> jax.Array:
        """Reads rows.

        Args:
          inputs: any integers, [...].
          out_sharding: of the result, on a mesh with Explicit axes.

        Returns:
          [..., features].

        Raises:
          ValueError: for ids that are no integers.
        """
        table: Any = self.embedding.get_value()
        read: Any = partial(lookup, padding_id=self.padding_id, bad_ids=self.bad_ids)
        if out_sharding is not None:
            read = jax.sharding.auto_axes(read, out_sharding=out_sharding)
        (rows,) = self.promote_dtype(
            (read(table, inputs),), dtype=self.dtype, inexact=False
        )
        return rows

    def attend(self, query, out_sharding: Any = None) -> jax.Array:
        """Products of a query with all rows: the output head of a language model.

        Its gradient is as large as the table. In a step of `plan_tables` only tables with
        `sparse=False` have it.

        Args:
          query: [..., features].
          out_sharding: of the result, on a mesh with Explicit axes.

        Returns:
          [..., num_embeddings].

        Raises:
          TypeError: in a training step that moves only rows of the table.
        """
        return super().attend(query, out_sharding)


class EmbeddingBag(Embed):
    """A vector for each bag of ids: their rows, weighted and pooled.

    Example:
      >>> layer = EmbeddingBag(5, 3, combiner="mean", padding_id=-1, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[1, 2, -1], [-1, -1, -1]])).shape
      (2, 3)
    """

    def __init__(
        self, num_embeddings: int, features: int, *, combiner: str = "sum", **arguments
    ):
        """Makes the table.

        Args:
          num_embeddings: rows.
          features: numbers per row.
          combiner: "sum", "mean" or "sqrtn", see `FeatureSpec`.
          **arguments: of `Embed`.

        Raises:
          ValueError: for another combiner.
        """
        check_combiner(combiner)
        super().__init__(num_embeddings, features, **arguments)
        self.combiner = combiner

    def __call__(self, inputs, weights=None, out_sharding: Any = None) -> jax.Array:
        """Pools the rows of bags.

        Args:
          inputs: any integers, [..., ids]; shorter bags are filled with `padding_id`.
          weights: floats like the ids, None for all one.
          out_sharding: of the rows before pooling, on a mesh with Explicit axes.

        Returns:
          [..., features]; zeros of an empty bag.

        Raises:
          ValueError: for weights of another shape.
        """
        rows = super().__call__(inputs, out_sharding)
        return pool(rows, inputs, weights, self.combiner, self.padding_id)


def table_paths(model: nnx.Module | nnx.State) -> tuple[str, ...]:
    """Paths of the tables among the parameters of a model, for `plan_tables`.

    Args:
      model: it, or its parameters as `nnx.split(model, nnx.Param, ...)` gives them.

    Example:
      >>> class Model(nnx.Module):
      ...   def __init__(self, rngs):
      ...     self.item = Embed(5, 3, rngs=rngs)
      ...     self.hour = Embed(24, 3, sparse=False, rngs=rngs)
      >>> table_paths(Model(nnx.Rngs(0)))
      ('item/embedding/value',)
    """
    state = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    found = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    paths = []
    for path, x in found:
        if isinstance(x, Table):
            ((rest, _),) = jax.tree_util.tree_leaves_with_path(x)
            paths.append(leaf_path((*path, *rest)))
    return tuple(paths)

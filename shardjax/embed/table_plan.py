"""Training the tables that a model looks up itself: what is read, and how rows move.

`shardjax.embed.table_planning` says which parameters are tables; a plan takes them out of
the tree. In a training step their ids are found first (`shardjax.embed.noting`), then the
rows of all ids are read once, as a block [ids, dim] (`shardjax.embed.in_graph`); the loss
is differentiated with respect to its parameters and to the block; and the row optimizers
move the rows named. To other devices and to the host: `shardjax.embed.table_placing`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from shardjax.embed.in_graph import (
    PADDING,
    BlockRows,
    NotedRows,
    RowBlock,
    TableHandle,
)
from shardjax.embed.noting import noted_ids
from shardjax.embed.probing import DeviceTable
from shardjax.embed.table_placing import export_table, place_table, rehash_table
from shardjax.embed.table_rows import TableRows
from shardjax.embed.table_state import (
    RowGradients as RowGradients,
    TableLeaf as TableLeaf,
    TableState as TableState,
    block_gradients,
    by_path,
    init_table,
    move_rows,
    read_block,
)
from shardjax.embed.vocabulary import init_vocabulary, translate
from shardjax.partition import leaf_path
from shardjax.sharded import fetch


@dataclass(frozen=True)
class TablePlan:
    """The tables among the parameters of a model; plain data, made by `plan_tables`.

    Attributes:
      leaves: the tables.
      mesh: the devices, None for one.
      axes: mesh axes that rows and batch are split over.
    """

    leaves: tuple[TableLeaf, ...]
    mesh: Mesh | None
    axes: tuple[str, ...]

    @property
    def parts(self) -> int:
        """Devices that rows are split over."""
        if self.mesh is None:
            return 1
        return int(np.prod([self.mesh.shape[axis] for axis in self.axes]))

    @property
    def _exchanged(self) -> tuple[str, ...]:
        """Axes over which rows are exchanged, none where there is one device."""
        return self.axes if self.parts > 1 else ()

    def split(self, params: PyTree) -> PyTree:
        """The parameters with None for each table."""
        paths = {leaf.path for leaf in self.leaves}

        def keep(path, x):
            return None if leaf_path(path) in paths else x

        return jax.tree_util.tree_map_with_path(keep, params)

    def insert(self, params: PyTree, values: Mapping[str, Any]) -> PyTree:
        """The parameters of `split` with a value for each table, by path."""

        def fill(path, x):
            return values.get(leaf_path(path), x) if x is None else x

        return jax.tree_util.tree_map_with_path(
            fill, params, is_leaf=lambda x: x is None
        )

    def specs(self) -> dict[str, TableState]:
        """A PartitionSpec per leaf of the state of the tables."""
        split: Any = jax.P(self.axes) if self.mesh is not None else jax.P()
        whole: Any = jax.P()
        return {
            leaf.path: TableState(
                split,
                [split] * leaf.optimizer.is_row.count(True),
                [whole] * leaf.optimizer.is_row.count(False),
                split,
                split,
                leaf.shape,
                leaf.optimizer.names,
                self._keys(leaf, split),
            )
            for leaf in self.leaves
        }

    def _keys(self, leaf: TableLeaf, value: Any = None) -> DeviceTable | None:
        """The shapes of the keys of a table, or a value in the place of each array."""
        if leaf.vocabulary is None:
            return None
        like = jax.eval_shape(lambda: init_vocabulary(leaf, self.mesh, self.axes))
        return like if value is None else jax.tree.map(lambda _: value, like)

    def shardings(self) -> Any:
        """A NamedSharding per leaf of the state, None without a mesh."""
        mesh = self.mesh
        if mesh is None:
            return None
        return jax.tree.map(
            lambda spec: jax.NamedSharding(mesh, spec),
            self.specs(),
            is_leaf=lambda x: isinstance(x, jax.P),
        )

    def abstract(self) -> dict[str, TableState]:
        """Shapes, dtypes and, over a mesh, shardings of the state."""

        def init(leaf: TableLeaf):
            like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            table = jax.eval_shape(lambda x: init_table(leaf, x, self.parts), like)
            return replace(table, keys=self._keys(leaf))

        shapes = {leaf.path: init(leaf) for leaf in self.leaves}
        if self.mesh is None:
            return shapes
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            self.shardings(),
        )

    def init(self, params: PyTree) -> dict[str, TableState]:
        """The state of the tables before the first step: copies, to be donated.

        Args:
          params: with the tables, as planned for.
        """
        values = by_path(params)
        tables = {leaf.path: values[leaf.path] for leaf in self.leaves}

        def init(tables):
            return {
                leaf.path: init_table(leaf, tables[leaf.path], self.parts)
                for leaf in self.leaves
            }

        shardings = self.shardings()
        if shardings is not None:
            shardings = {k: replace(x, keys=None) for k, x in shardings.items()}
        made = jax.jit(init, out_shardings=shardings)(tables)
        for leaf in self.leaves:
            if leaf.vocabulary is not None:
                keys = init_vocabulary(leaf, self.mesh, self.axes)
                made[leaf.path] = replace(made[leaf.path], keys=keys)
        return made

    def place(self, tables: Mapping[str, TableState]) -> dict[str, TableState]:
        """The state of the tables on the devices of this plan.

        Args:
          tables: state of a plan for the same tables and optimizers, on any devices; it
            goes through the memory of the host. A table with a vocabulary may have
            another number of rows.

        Raises:
          ValueError: for other tables, or if keys find no room in a table with a
            vocabulary: each device has those that its share of the hashes gives it.
        """
        wanted, moved = self.abstract(), {}
        for leaf in self.leaves:
            found, keyed = tables.get(leaf.path), leaf.vocabulary is not None
            if found is None or not _fits(leaf, found):
                has = {path: table.shape for path, table in tables.items()}
                kind = "with keys" if keyed else "without keys"
                raise ValueError(
                    f"the state has no table {leaf.path!r} of {leaf.rows} rows of dim"
                    f" {leaf.dim} {kind}, got {has}. Plan with the parameters and"
                    " vocabularies it was made of"
                )
            old, like = fetch(found), wanted[leaf.path]
            if keyed:
                moved[leaf.path] = rehash_table(leaf.path, old, like)
            else:
                moved[leaf.path] = place_table(leaf, old, like)
        return moved

    def join(self, params: PyTree, tables: Mapping[str, TableState]) -> PyTree:
        """The parameters of `split` with the tables in their place again."""
        return self.insert(
            params,
            {
                leaf.path: tables[leaf.path].rows[: leaf.rows].reshape(leaf.shape)
                for leaf in self.leaves
            },
        )

    def export(self, tables: Mapping[str, TableState]) -> dict[str, TableRows]:
        """Copies tables to the host, with the state of their optimizers.

        Of several processes all must call it.

        Args:
          tables: their state.

        Returns:
          By path, the rows of all layers one after the other; their keys are the ids, from
          0 on. Of a table with a vocabulary, the rows of the keys that it has.
          `pandas.DataFrame(found.rows, index=found.keys)` is a table of them.

        Example:
          >>> import optax
          >>> from shardjax.embed import plan_tables
          >>> plan = plan_tables({"item": jnp.eye(2)}, ["item"], optax.sgd(0.1))
          >>> found = plan.export(plan.init({"item": jnp.eye(2)}))["item"]
          >>> found.keys, found.rows.tolist()
          (array([0, 1], dtype=uint64), [[1.0, 0.0], [0.0, 1.0]])
        """

        return {leaf.path: export_table(tables[leaf.path]) for leaf in self.leaves}

    def translate(
        self, tables: Mapping[str, TableState], batch: PyTree, *, insert: bool = True
    ) -> tuple[PyTree, dict[str, TableState], jax.Array]:
        """Row numbers in the place of the `Keys` of a batch; `make_model_step` does it.

        Inside jit and, over a mesh, inside `jax.shard_map`, where all devices take part.

        Args:
          tables: their state; donate it.
          batch: a tree with `Keys` in it, of this device.
          insert: whether keys that are new get rows; False for an evaluation.

        Returns:
          The batch, the tables, and how many keys of this device have no row: int32 [].

        Raises:
          ValueError: for keys of a table without a vocabulary.
        """
        self._check_inside()
        return translate(self.leaves, tables, batch, self._exchanged, insert)

    def gather(
        self, fn: Callable[..., Any], tables: Mapping[str, TableState], *args
    ) -> tuple[dict[str, RowBlock], dict[str, TableState]]:
        """Reads the rows that a function is going to look up.

        Inside jit and, over a mesh, inside `jax.shard_map`.

        Args:
          fn: `fn(handles, *args)`, handles by path, for `insert`.
          tables: their state.
          *args: pytrees of arrays; of this device.

        Returns:
          A block per table, and the tables for the next call: only their `places` differ.
        """
        self._check_inside()
        handles = {
            leaf.path: _handle(leaf, NotedRows(leaf.path, leaf.dim, leaf.dtype))
            for leaf in self.leaves
        }
        found = noted_ids(lambda *args: fn(handles, *args), *args)
        blocks, after = {}, dict(tables)
        for leaf in self.leaves:
            ids = [x.reshape(-1) for x in found.get(leaf.path, [])]
            if not sum(map(len, ids)):
                ids = [jnp.full(1, PADDING, jnp.int32)]
            ids = jnp.concatenate(ids)
            block = read_block(tables[leaf.path], ids, self._exchanged)
            blocks[leaf.path] = block
            after[leaf.path] = replace(tables[leaf.path], places=block.places)
        return blocks, after

    def _check_inside(self) -> None:
        try:
            jax.lax.axis_size(self._exchanged)
        except NameError as e:
            raise ValueError(
                f"tables that are split over the mesh axes {self.axes} must be used inside"
                " jax.shard_map over them, each device with its part of the batch, with"
                " `plan.specs()` for the tables. Or let `make_model_step` do it"
            ) from e

    def handles(
        self, blocks: Mapping[str, RowBlock], rows: Mapping[str, jax.Array]
    ) -> dict[str, "TableHandle"]:
        """What stands for the tables where rows are differentiated by.

        Args:
          blocks: of `gather`.
          rows: those of the blocks, by path.
        """
        return {
            leaf.path: _handle(
                leaf, BlockRows(blocks[leaf.path], rows[leaf.path], leaf.dtype)
            )
            for leaf in self.leaves
        }

    def row_gradients(
        self, blocks: Mapping[str, RowBlock], grads: Mapping[str, jax.Array]
    ) -> dict[str, RowGradients]:
        """What `update` takes, of gradients with respect to the rows of blocks."""
        return {
            path: block_gradients(block, grads[path]) for path, block in blocks.items()
        }

    def value_and_grad(self, loss: Callable[..., Any], has_aux: bool = False):
        """Like `jax.value_and_grad`, for a loss whose parameters have tables.

        Args:
          loss: `loss(params, *args)`, with handles in the place of tables.
          has_aux: whether it returns (value, anything else).

        Returns:
          `f(params, tables, *args) -> (value, grads, row_grads, tables)`, to call in jit:
          `params` are those of `split` and `grads` theirs; `row_grads` and the tables are
          what `update` takes, which has to see the gradients of all microbatches at once
          (`jax.lax.scan` stacks them; the tables go through its carry).
        """

        def run(params, tables, *args):
            def whole(handles, params, *args):
                return loss(self.insert(params, handles), *args)

            blocks, tables = self.gather(whole, tables, params, *args)

            def of(params, rows):
                return whole(self.handles(blocks, rows), params, *args)

            rows = {path: block.rows for path, block in blocks.items()}
            grad = jax.value_and_grad(of, (0, 1), has_aux=has_aux)
            value, (grads, row_grads) = grad(params, rows)
            return value, grads, self.row_gradients(blocks, row_grads), tables

        return run

    def update(
        self,
        tables: Mapping[str, TableState],
        row_grads: Mapping[str, RowGradients],
        finite: jax.Array | None = None,
    ) -> dict[str, TableState]:
        """Moves rows by their gradients: one step of the row optimizers.

        Inside jit and, over a mesh, inside `jax.shard_map`. A row's gradients, from
        whichever lookup, microbatch or device, are summed first.

        Args:
          tables: their state; donate it.
          row_grads: of `row_gradients` or `value_and_grad`.
          finite: bool [], False to leave everything as it is; None for True.
        """
        return {
            leaf.path: move_rows(
                leaf,
                tables[leaf.path],
                row_grads[leaf.path],
                self._exchanged,
                finite,
            )
            for leaf in self.leaves
        }


def _handle(leaf: TableLeaf, source) -> TableHandle:
    *layers, rows, dim = leaf.shape
    first = np.arange(int(np.prod(layers)), dtype=np.int32).reshape(layers) * rows
    return TableHandle(jnp.asarray(first, jnp.int32), (rows, dim), source)


def _fits(leaf: TableLeaf, table: TableState) -> bool:
    """Whether a state is one of a table, on whichever devices."""
    if leaf.vocabulary is None:
        return table.keys is None and table.shape == leaf.shape
    return table.keys is not None and table.shape[1:] == leaf.shape[1:]

"""Copying the rows that training has touched into another table.

Where the target has to be a table of its own, on other devices or with other features,
copying it whole is avoided another way: the keys of training batches are collected, and every
so many batches their rows are copied. That is what PaddlePaddle's fleet does
(`copy_table_config` with `sparse_copy_by_feasign`), where each worker copies its own keys
after its own number of batches; here all keys are copied between the same two steps, so that
the other table is what this one was at one step.

`shardjax.rl.keep_target` needs no second table, no copying and no keys: take that where the
same model reads both.
"""

from typing import Any

import numpy as np


class TouchedCopy:
    """Collects keys of a table, and copies their rows.

    Args:
      table: the name of the table, in both collections.
      every: batches between copies.

    Attributes:
      batches: since the last copy.
      copied: rows, in all.
      skipped: keys in all that had no row to copy: not admitted, or evicted since.

    Raises:
      TypeError, ValueError: if `every` is not a positive integer.

    Example:
      >>> import shardjax as sj
      >>> def tables():
      ...   item = sj.embed.TableSpec("item", dim=2)
      ...   return sj.embed.EmbeddingCollection(
      ...     {"item": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1"))
      >>> source, target = tables(), tables()
      >>> state = source.load_rows(source.init(), "item", [3, 4], np.eye(2))
      >>> copy = TouchedCopy("item", every=2)
      >>> for keys in ([3, 3, 4], [4, 5]):
      ...   copy.add(keys)
      >>> copy.due
      True
      >>> target_state = copy.move(source, state, target, target.init())
      >>> copy.copied, copy.skipped
      (2, 1)
      >>> target.lookup_rows(target_state, "item", [4])["rows"].tolist()
      [[0.0, 1.0]]
    """

    def __init__(self, table: str, every: int = 100):
        if isinstance(every, bool) or not isinstance(every, int | np.integer):
            raise TypeError(
                f"`every` must be a number of batches, got {every!r}. Give an int"
            )
        if every < 1:
            raise ValueError(f"`every` must be at least 1 batch, got {every}")
        self.table, self.every = table, int(every)
        self.batches = self.copied = self.skipped = 0
        self._keys: list[np.ndarray] = []

    def add(self, keys: Any) -> None:
        """Notes the keys of a batch that trains the table, integers of any shape.

        Raises:
          TypeError: for keys that are not integers.
        """
        keys = np.asarray(keys)
        if keys.dtype.kind not in "iu":
            raise TypeError(
                f"keys of table {self.table!r} must be integers, got {keys.dtype}. Hash"
                " what they are made of first"
            )
        # as of shardjax.embed.as_keys: negative ones wrap
        self._keys.append(np.unique(keys.astype(np.uint64, casting="unsafe")))
        self.batches += 1

    @property
    def due(self) -> bool:
        """Whether `every` batches have been noted since the last copy."""
        return self.batches >= self.every

    def move(self, source: Any, state: Any, target: Any, target_state: Any) -> Any:
        """Copies the rows of the noted keys, and forgets the keys.

        Call it between two steps, with no batch prepared for the target's collection. Where
        there are several processes all of them call it, with the keys of each.

        Args:
          source: the `shardjax.embed.EmbeddingCollection` that is trained.
          state: of its devices.
          target: another collection, with a table of this name and dim.
          target_state: of its devices; donated.

        Returns:
          The target's state with the rows. Optimizer state is not copied.

        Raises:
          KeyError: if one of them has no such table.
          ValueError: if the table has another dim in the target.
        """
        keys = np.unique(np.concatenate([np.zeros(0, np.uint64), *self._keys]))
        read = source.lookup_rows(state, self.table, keys)
        found = read["found"]
        target_state = target.load_rows(
            target_state, self.table, keys[found], read["rows"][found]
        )
        self.copied += int(found.sum())
        self.skipped += int((~found).sum())
        self.batches, self._keys = 0, []
        return target_state

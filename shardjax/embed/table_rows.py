"""Rows of a table on the host, with all that is known of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardjax.embed.eviction import UNIT
from shardjax.embed.spec import TableSpec


@dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows of one table, copied to the host.

    What is known of them beside their numbers is what the policies of the table go by. It
    is kept for tables with an `evict` or a storage, and for those that share their slab;
    for others it is None. Batches that are planned ahead count already: export between two
    loops for what has been trained alone.

    Attributes:
      keys: uint64 [n].
      rows: [n, dim], of the table's dtype.
      row_state: leaves of the optimizer's state, [n, ...] each.
      last_step: int32 [n], the last step that uses each row, from 1.
      uses: uint32 [n], how many steps do; None for a table with the policy ShowClick.
      scores: float64 [n], of shows and clicks, decayed; None without that policy.
    """

    keys: np.ndarray
    rows: np.ndarray
    row_state: list[np.ndarray]
    last_step: np.ndarray | None = None
    uses: np.ndarray | None = None
    scores: np.ndarray | None = None

    def take(self, index: np.ndarray) -> "TableRows":
        """Those of a mask, bool [n], or of numbers, int [m]."""
        facts = {
            name: None if x is None else x[index]
            for name in FACTS
            for x in [getattr(self, name)]
        }
        state = [x[index] for x in self.row_state]
        return TableRows(self.keys[index], self.rows[index], state, **facts)


FACTS = ("last_step", "uses", "scores")


def as_facts(
    names: Sequence[str], last_steps: np.ndarray, tallies: np.ndarray
) -> dict[str, np.ndarray]:
    """Fields of `TableRows`, of `facts_of`, from what tiers keep of rows."""
    if not names:
        return {}
    kept = tallies / UNIT if "scores" in names else tallies
    return dict(zip(names, (last_steps, kept), strict=True))


def facts_of(spec: TableSpec, tracked: bool) -> tuple[str, ...]:
    """Which fields of `TableRows` a table has beside its numbers.

    Args:
      spec: of the table.
      tracked: whether anything is kept of its rows.
    """
    if not tracked:
        return ()
    return "last_step", "uses" if spec.show_click is None else "scores"

"""Increments: steps that have the rows which changed since another one, and no others.

The step that an increment follows may be an increment itself; the last of such a *chain*
has all rows. Of each key the newest record counts: the chain is read from its newest step
on, and what has been met, or has left since, is passed over.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from shardjax.checkpoint.manifest import CorruptCheckpointError, Manifest, corrupt
from shardjax.checkpoint.reading import StepReader
from shardjax.checkpoint.rows import read_records, read_removed
from shardjax.embed.changes import Mark
from shardjax.embed.index import Index
from shardjax.embed.records import keys_of
from shardjax.embed.snapshot import Snapshot


def chain_of(reader: StepReader, step: int) -> list[Manifest]:
    """A step and those that its rows are to be read from, newest first.

    Raises:
      FileNotFoundError: if there is no such step.
      CorruptCheckpointError: if one that it needs is not there, or a manifest has changed.
    """
    chain = [reader.read(step)]
    while (base := base_of(chain[-1])) is not None:
        try:
            chain.append(reader.read(base))
        except FileNotFoundError:
            what = f"step {base}, whose rows it goes on from, is missing"
            raise corrupt(chain[-1].path, chain[-1].step, what) from None
    return chain


def base_of(manifest: Manifest) -> int | None:
    """The step that an increment follows; None for one with all rows."""
    rows = manifest.details.get("rows")
    return None if rows is None else rows["base"]


def parts_of(manifest: Manifest) -> list[tuple[Path, dict[str, Any]]]:
    """Where the rows are that each process wrote, and how many of what."""
    rows, path = manifest.details["rows"], manifest.path / "tables"
    if "parts" not in rows:  # of one process
        return [(path, {**rows, "counts": manifest.details["counts"]})]
    return [(path / part["folder"], part) for part in rows["parts"]]


def read_chain(chain: Sequence[Manifest]) -> Iterator[tuple[int, np.ndarray]]:
    """The number of a group and table records, int32 [n, 5 + words], of all rows, once
    each, a part at a time.

    Takes 16 to 32 bytes of RAM for each row of an increment.

    Args:
      chain: of `chain_of`, of steps that have been verified.

    Raises:
      CorruptCheckpointError: if there are not as many rows as there were.
    """
    groups = chain[0].details["tables"]["groups"]
    given = [0] * len(groups)
    met: dict[tuple[int, int], Index] = {}
    for manifest in chain:
        is_last = base_of(manifest) is None
        for path, part in parts_of(manifest):
            for number, records in read_records(path, groups, part["written"]):
                new = _pass_over(met, number, records, note=not is_last)
                given[number] += len(new)
                yield number, new
        for path, part in parts_of(manifest) if not is_last else ():
            for number, keys in read_removed(path, groups, part["removed"]):
                _pass_over(met, number, keys, note=True)
    counts = [group["rows"] for group in groups]
    if given != counts:
        raise CorruptCheckpointError(
            f"step {chain[0].step} in {str(chain[0].path.parent)!r} had {counts} rows by"
            f" group, and with steps {[m.step for m in chain[1:]]}, which it goes on from,"
            f" it has {given}. Go back to a step before"
        )


def _pass_over(
    met: dict[tuple[int, int], Index], number: int, records: np.ndarray, note: bool
) -> np.ndarray:
    """Those records whose keys have not been met; if `note`, they have been from now on."""
    keys, tables = keys_of(records), records[:, 2]
    is_new = np.ones(len(keys), bool)
    for t in np.unique(tables).tolist():
        at = np.flatnonzero(tables == t)
        if (index := met.get((number, t))) is not None:
            is_new[at] = index.lookup(keys[at]) < 0
        if note:
            index = met.setdefault((number, t), Index())
            own = keys[at[is_new[at]]]
            index.insert(own, np.zeros(len(own), np.int32))
    return records if is_new.all() else records[is_new]


class Increments:
    """Decides which saves are increments, and of what.

    Args:
      full_every: of so many saves in a row, one has all rows.
      collection: whose changes are kept; None for a state without tables.
    """

    def __init__(self, full_every: int, collection: Any):
        self._full_every = full_every
        self._snapshots = None if collection is None else collection.snapshots
        self._base: tuple[int, Mark] | None = None
        self._length = 0  # of the chain that the base ends
        if full_every > 1 and self._snapshots is not None:
            self._snapshots.keep_changes()

    def base(self, steps: Sequence[int]) -> tuple[int, Mark] | None:
        """What the next save follows, of the steps that there are; None for nothing."""
        if self._base is None or self._length >= self._full_every:
            return None
        return self._base if self._base[0] in steps else None

    def committed(self, step: int, snapshot: Snapshot) -> None:
        """Takes note of a save that has been written."""
        self._length = 1 if snapshot.removed is None else self._length + 1
        self._base = step, snapshot.mark
        assert self._snapshots is not None
        self._snapshots.forget(snapshot.mark)

    def restored(self, step: int, length: int, mark: Mark | None) -> None:
        """Goes on from a step that ends a chain of some length."""
        self._base = None if mark is None else (step, mark)
        self._length = length


class Cycle:
    """What saves cost, of which some are increments, as if all of them cost the same.

    Args:
      saves: after which their costs repeat.

    Example:
      >>> cycle = Cycle(2)
      >>> [cycle.mean("stall", x) for x in (4.0, 2.0, 4.0)]
      [4.0, 3.0, 3.0]
    """

    def __init__(self, saves: int):
        self._saves = saves
        self._last: dict[str, list[float]] = {}

    def _add(self, name: str, value: float) -> list[float]:
        self._last[name] = [*self._last.get(name, ()), value][-self._saves :]
        return self._last[name]

    def mean(self, name: str, value: float) -> float:
        """Of the last values of a name, with a new one."""
        return fmean(self._add(name, value))

    def most(self, name: str, value: float) -> float:
        """The greatest of the last values of a name, with a new one."""
        return max(self._add(name, value))

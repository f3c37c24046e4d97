"""What has changed in the rows of a collection since an earlier snapshot.

A row that a batch has used since has a later `last_step`. Where nobody keeps that, as the
rows never leave the devices, the steps themselves note which slots they write. Keys whose
rows have left for good are listed. All this is kept only if somebody asks for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardjax.embed.eviction import Evicted
from shardjax.embed.moves import Move

_LEAST_LISTED = 4096  # evicted rows that are listed however few others there are


@dataclass(frozen=True)
class Mark:
    """A moment that changes are counted from.

    Attributes:
      sequence: number of the training plan after which it is.
      removed: per group, the keys that had been listed as removed.
      eras: per group: what has changed since a moment of another era is not known.
    """

    sequence: int
    removed: tuple[int, ...]
    eras: tuple[int, ...]

    def leads_to(self, later: "Mark") -> bool:
        """Whether it is known what has changed from this moment to a later one."""
        return self.eras == later.eras and self.sequence <= later.sequence


class Removals:
    """Keys of one group whose rows have left for good, in order.

    Attributes:
      era: grows when changes are forgotten, or made that nobody lists.
      count: keys listed from the start of the era.
    """

    def __init__(self):
        self.era = 0
        self.count = 0
        self._kept = False
        self._dropped = 0  # of those listed, from the start
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []

    def keep(self) -> None:
        """From now on keys are listed."""
        if not self._kept:
            self._kept = True
            self.forget()

    def forget(self) -> None:
        """Begins another era, such as after a change of all rows."""
        self.era += 1
        self.count = self._dropped = 0
        self._parts.clear()

    def add(self, evicted: Evicted, rows: int) -> None:
        """Lists rows that leave.

        Args:
          evicted: they.
          rows: that stay: where more have left than stay, a list is of no use.
        """
        if not self._kept or not len(evicted):
            return
        self._parts.append((evicted.keys, evicted.tables))
        self.count += len(evicted)
        if self.count - self._dropped > max(rows, _LEAST_LISTED):
            self.forget()

    def between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Salted keys, uint64 [n], and tables, int32 [n], from and to counts of them."""
        keys = [np.zeros(0, np.uint64), *(k for k, _ in self._parts)]
        tables = [np.zeros(0, np.int32), *(t for _, t in self._parts)]
        own = slice(start - self._dropped, stop - self._dropped)
        return np.concatenate(keys)[own], np.concatenate(tables)[own]

    def drop(self, count: int) -> None:
        """Forgets the first keys: nobody will ask for changes from before them."""
        while self._parts and self._dropped + len(self._parts[0][0]) <= count:
            self._dropped += len(self._parts.pop(0)[0])


class SlotChanges:
    """At which training plan each slot on the devices was last written.

    Args:
      owners: of slots.
    """

    def __init__(self, owners: int):
        self._steps = np.zeros((owners, 0), np.int32)

    def note(self, step: int, slots: Iterable[np.ndarray]) -> None:
        """Notes that a plan writes slots, int32 [owners, n] each; beyond all: padding."""
        for part in slots:
            for o, steps in enumerate(self._steps):
                steps[part[o][part[o] < len(steps)]] = step

    def reserve(self, slots: int) -> None:
        """Makes room to know of so many slots per owner."""
        if slots > self._steps.shape[1]:
            known = self._steps
            room = max(slots, 2 * known.shape[1])
            self._steps = np.zeros((len(known), room), np.int32)
            self._steps[:, : known.shape[1]] = known

    def since(self, sequence: int, slots: int) -> np.ndarray:
        """Which slots have been written after a plan, bool [owners, slots]."""
        self.reserve(slots)
        return self._steps[:, :slots] > sequence


def written_slots(
    group: int, moves: Sequence[Move], slots: np.ndarray
) -> list[np.ndarray]:
    """Slots of a group whose rows a step changes, int32 [owners, n] each.

    Args:
      group: its number.
      moves: of rows, before the step: new ones are filled.
      slots: that the step updates.
    """
    fills = [fill.slots for m in moves if m.group == group for fill in m.fills]
    return [slots, *fills]

"""Which rows leave for good at a step, as a test on what is known of each row."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardjax.embed.policies import LFU, LRU, TTL, Eviction, ShowClick
from shardjax.embed.records import hashes_of
from shardjax.embed.segments import Facts, Segment

UNIT = 4096  # of ShowClick scores in a tally
MOST_TALLY = 2**32 - 1
LAST_STEP, TALLY = 1, 2  # fields of Facts


@dataclass(eq=False)
class Evicted:
    """Rows of one group that leave for good.

    They can be read where they are until the step at which they are gone: `is_gone`.

    Attributes:
      keys, tables: uint64 (salted) and int32 [n].
      last_steps, tallies: int32 and uint32 [n], what is known of them.
      owners: int32 [n].
      slots: int32 [n] of those on the devices, else -1.
      rows: int32 [n] of the RAM tier, else -1.
      segments: that have those on disk.
      sources: int32 [n], which of them, else -1.
      numbers: int64 [n] of the records there.
    """

    keys: np.ndarray
    tables: np.ndarray
    last_steps: np.ndarray
    tallies: np.ndarray
    owners: np.ndarray
    slots: np.ndarray
    rows: np.ndarray
    segments: tuple[Segment, ...]
    sources: np.ndarray
    numbers: np.ndarray
    is_gone: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def join(cls, parts: list["Evicted"]) -> "Evicted":
        """One of several."""
        segments, sources = [], []
        for x in parts:
            sources.append(np.where(x.sources < 0, -1, x.sources + len(segments)))
            segments.extend(x.segments)
        return cls(
            np.concatenate([x.keys for x in parts]),
            np.concatenate([x.tables for x in parts]),
            np.concatenate([x.last_steps for x in parts]),
            np.concatenate([x.tallies for x in parts]),
            np.concatenate([x.owners for x in parts]),
            np.concatenate([x.slots for x in parts]),
            np.concatenate([x.rows for x in parts]),
            tuple(segments),
            np.concatenate(sources),
            np.concatenate([x.numbers for x in parts]),
        )

    @classmethod
    def part(
        cls,
        facts: Facts,
        table: int,
        owners,
        *,
        slots=None,
        rows=None,
        segment=None,
        numbers=None,
    ) -> "Evicted":
        """Rows of one table that are all in one place."""
        keys, last_steps, tallies = facts
        n = len(keys)
        none = np.full(n, -1, np.int32)
        return cls(
            keys,
            np.full(n, table, np.int32),
            last_steps,
            tallies,
            owners,
            none if slots is None else slots.astype(np.int32),
            none if rows is None else rows.astype(np.int32),
            () if segment is None else (segment,),
            none if segment is None else np.zeros(n, np.int32),
            np.full(n, -1, np.int64) if numbers is None else numbers,
        )


def is_due(policy: Eviction, step: int) -> bool:
    """Whether a policy looks for rows before a step, numbered from 1."""
    every = getattr(policy, "every", None)
    return every is not None and step > 1 and (step - 1) % every == 0


def decayed(tallies: np.ndarray, policy: ShowClick) -> np.ndarray:
    """Tallies, uint32 [n], after a `shrink`."""
    return np.floor(tallies * np.float64(policy.decay)).astype(np.uint32)


@dataclass(frozen=True)
class _Below:
    """A test: last step or tally below a number."""

    field: int  # of Facts
    least: int

    def __call__(self, facts: Facts) -> np.ndarray:
        return facts[self.field] < self.least


@dataclass(frozen=True)
class _Lowest:
    """A test: the lowest of all, by a score and then by the hash of the key."""

    field: int  # of Facts
    score: int
    hash: int  # with this score, those with a lower hash

    def __call__(self, facts: Facts) -> np.ndarray:
        scores = facts[self.field]
        hashes = hashes_of(facts[0])
        ties = (scores == self.score) & (hashes < np.uint64(self.hash))
        return (scores < self.score) | ties


def lowest(
    scan: Callable[[], Iterable[Facts]], field: int, rows: int
) -> _Lowest | None:
    """The test for the lowest of some rows, equal ones by a hash of their key.

    Args:
      scan: gives their facts, in parts; twice.
      field: of Facts, that is compared.
      rows: how many are to be left; None is returned if there are not more.

    Example:
      >>> facts = np.array([1, 2, 3], np.uint64), np.zeros(3, np.int32), np.array([5, 2, 9])
      >>> lowest(lambda: [facts], TALLY, 1)(facts).tolist()
      [True, True, False]
    """
    parts = [facts[field] for facts in scan()]
    count = sum(map(len, parts)) - rows
    if count <= 0:
        return None
    scores = np.concatenate(parts)
    scores.partition(count - 1)
    score = int(scores[count - 1])
    rest = count - int((scores < score).sum())
    ties = np.concatenate([f[0][f[field] == score] for f in scan()])
    hashes = hashes_of(ties)
    hashes.sort()
    if rest == len(hashes):
        return _Lowest(field, score + 1, 0)
    return _Lowest(field, score, int(hashes[rest]))


class Cut:
    """The test that decides about every row of one table.

    Args:
      policies: those that are due, in their order.
      step: the next one.
      scan: gives the facts of all rows of the table, in parts.
    """

    def __init__(
        self,
        policies: Iterable[Eviction],
        step: int,
        scan: Callable[[], Iterator[Facts]],
    ):
        self.tests: list[Callable[[Facts], np.ndarray]] = []
        for policy in policies:
            if isinstance(policy, TTL):
                self.tests.append(_Below(LAST_STEP, step - policy.steps))
            elif isinstance(policy, ShowClick):
                self.tests.append(_Below(TALLY, int(np.ceil(policy.threshold * UNIT))))
            elif isinstance(policy, LRU | LFU):
                field = LAST_STEP if isinstance(policy, LRU) else TALLY
                test = lowest(lambda: self._rest(scan), field, policy.rows)
                if test is not None:
                    self.tests.append(test)

    def _rest(self, scan: Callable[[], Iterator[Facts]]) -> Iterator[Facts]:
        """What is known of the rows that stay so far."""
        for facts in scan():
            stay = ~self(facts)
            yield facts[0][stay], facts[1][stay], facts[2][stay]

    def __bool__(self) -> bool:
        return bool(self.tests)

    def __call__(self, facts: Facts) -> np.ndarray:
        """Which rows leave, bool [n]."""
        leaves = np.zeros(len(facts[0]), bool)
        for test in self.tests:
            leaves |= test(facts)
        return leaves

    def oldest(self) -> int | None:
        """The last step below which rows leave, if nothing else decides; or None."""
        if all(isinstance(t, _Below) and t.field == LAST_STEP for t in self.tests):
            return max((t.least for t in self.tests), default=0)  # type: ignore[attr-defined]
        return None

"""Who may have a row, and who has to leave: options of a `TableSpec`, frozen data.

*Admission* decides whether a key that training meets gets a row. One that does not (yet)
reads zeros, counts in a mean, and trains nothing; its ids are counted as `refused`.

*Eviction* deletes rows from wherever they lie: value, optimizer state and all. A key that
comes back starts anew. (Rows that leave a tier for the next one are *written back*, which is
another thing and changes nothing.) It happens between two steps that the numbers of steps
alone determine, whatever the window or the storage: a table with ``every=1000`` looks for rows
that have to leave before its steps 1001, 2001, and so on.
"""

from dataclasses import dataclass

import numpy as np


def check_integer(name: str, value, least: int, most: int = 2**31 - 2) -> None:
    """Raises unless a value is an integer in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}], got {value}")


def check_number(name: str, value, rule: str, holds) -> None:
    """Raises unless a value is a number for which a rule holds."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not holds(value):
        raise ValueError(f"{name} must be {rule}, got {value}")


@dataclass(frozen=True)
class Always:
    """Every key gets a row when training first meets it."""


@dataclass(frozen=True)
class MinCount:
    """A key gets a row with its n-th occurrence, those within one batch included.

    The batch that has the n-th occurrence reads and trains the row with all of them.

    Attributes:
      count: n.
      most_keys: keys without a row whose occurrences are counted at a time. With exact
        counts, the half that occurred least is forgotten when there are more (counted as
        `forgotten_candidates`); about 40 bytes of RAM each.
      false_positive_rate: None for exact counts; else occurrences are counted in a
        counting Bloom filter (Fan et al. 2000, with conservative update: Estan and
        Varghese 2002) made for `most_keys` keys, in which at most this share of keys
        seems to have occurred before. It takes 1.44 log2(1 / rate) bytes per key,
        `count` is at most 255 then, and a key that has left for good gets a row again
        with its next occurrence: the filter forgets nothing.

    Example:
      >>> MinCount(2).count
      2
    """

    count: int
    most_keys: int = 10_000_000
    false_positive_rate: float | None = None

    def __post_init__(self):
        rate = self.false_positive_rate
        most = 2**31 - 2 if rate is None else 255
        check_integer("`count` of MinCount", self.count, 1, most)
        check_integer("`most_keys` of MinCount", self.most_keys, 1)
        if rate is not None:
            name = "`false_positive_rate` of MinCount"
            check_number(name, rate, "between 0 and 1", lambda x: 0 < x < 1)


@dataclass(frozen=True)
class Probability:
    """Each occurrence of a key without a row gives it one with a probability.

    Chance is a function of the seed, the table, the key and the step.

    Attributes:
      p: the probability, in (0, 1].

    Example:
      >>> Probability(0.1).p
      0.1
    """

    p: float

    def __post_init__(self):
        check_number("`p` of Probability", self.p, "in (0, 1]", lambda x: 0 < x <= 1)


Admission = Always | MinCount | Probability


@dataclass(frozen=True)
class TTL:
    """Rows that none of the last steps has used leave.

    Attributes:
      steps: how many steps. A row that was last used exactly this many steps ago stays.
      every: steps from one look for such rows to the next.

    Example:
      >>> TTL(steps=100_000).every
      1000
    """

    steps: int
    every: int = 1000

    def __post_init__(self):
        check_integer("`steps` of TTL", self.steps, 1)
        check_integer("`every` of TTL", self.every, 1)


@dataclass(frozen=True)
class LRU:
    """Of more rows than permitted, those leave whose last use is the longest ago.

    Rows of the same step leave in the order of a hash of their keys. The table may have
    more rows until the next look. A look takes 8 bytes of RAM per row for a moment, and 24
    for each whose step is the last from which some rows leave.

    Attributes:
      rows: how many are permitted.
      every: steps from one look to the next.

    Example:
      >>> LRU(rows=1_000_000).rows
      1000000
    """

    rows: int
    every: int = 1000

    def __post_init__(self):
        check_integer("`rows` of LRU", self.rows, 1)
        check_integer("`every` of LRU", self.every, 1)


@dataclass(frozen=True)
class LFU:
    """Of more rows than permitted, those leave that the fewest steps have used.

    Otherwise as `LRU`. In a table that has `ShowClick` as well, the lowest scores leave.

    Attributes:
      rows: how many are permitted.
      every: steps from one look to the next.

    Example:
      >>> LFU(rows=1_000_000, every=500).every
      500
    """

    rows: int
    every: int = 1000

    def __post_init__(self):
        check_integer("`rows` of LFU", self.rows, 1)
        check_integer("`every` of LFU", self.every, 1)


@dataclass(frozen=True)
class ShowClick:
    """Rows whose decayed score of shows and clicks is low leave (as in PaddlePaddle's CTR
    tables).

    Each occurrence of a key in an example with label y adds
    ``click_weight * y + show_weight * (1 - y)`` to its score. `EmbeddingCollection.shrink`,
    called at the end of a day or a pass, multiplies all scores by `decay`; rows whose
    score is then below the threshold leave. Batches need labels in [0, 1].

    Attributes:
      decay: in (0, 1].
      threshold: a row whose score equals it stays.
      show_weight: of an occurrence without a click.
      click_weight: of one with.
      every: None to do it when `shrink` is called; or steps from one time to the next.

    Scores are kept in steps of 1/4096 and stop at 1,048,575: so a sum does not depend on
    its order.

    Example:
      >>> ShowClick(decay=0.98, threshold=0.8).show_weight
      0.1
    """

    decay: float = 0.98
    threshold: float = 0.8
    show_weight: float = 0.1
    click_weight: float = 1.0
    every: int | None = None

    def __post_init__(self):
        check_number("`decay` of ShowClick", self.decay, "in (0, 1]", _in_unit)
        for name in ("threshold", "show_weight", "click_weight"):
            value = getattr(self, name)
            rule = "in [0, 1000]"
            check_number(
                f"`{name}` of ShowClick", value, rule, lambda x: 0 <= x <= 1000
            )
        if self.every is not None:
            check_integer("`every` of ShowClick", self.every, 1)


def _in_unit(x) -> bool:
    return 0 < x <= 1


@dataclass(frozen=True)
class Never:
    """No row leaves."""


Eviction = Never | TTL | LRU | LFU | ShowClick


def check_policies(owner: str, admit, evict) -> tuple[Eviction, ...]:
    """The evictions of a table as a tuple, without `Never`.

    Raises:
      TypeError: for something else than policies.
      ValueError: for two of one kind.
    """
    if not isinstance(admit, Admission):
        raise TypeError(
            f"`admit` of {owner} must be Always(), MinCount(n) or Probability(p), got"
            f" {admit!r}"
        )
    several = evict if isinstance(evict, tuple) else (evict,)
    for policy in several:
        if not isinstance(policy, Eviction):
            raise TypeError(
                f"`evict` of {owner} must be Never(), TTL(steps), LRU(rows), LFU(rows),"
                f" ShowClick(...) or a tuple of them, got {policy!r}"
            )
    several = tuple(x for x in several if not isinstance(x, Never))
    kinds = [type(x).__name__ for x in several]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"`evict` of {owner} has one kind of policy twice: {kinds}")
    return several

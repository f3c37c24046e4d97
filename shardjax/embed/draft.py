"""A batch's keys looked up: which unique keys it has, and where their rows are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardjax.embed import translate as kernels
from shardjax.embed.admission import Gate
from shardjax.embed.eviction import UNIT
from shardjax.embed.groups import Table
from shardjax.embed.index import NEW, Index, find_entries
from shardjax.embed.inputs import Input
from shardjax.embed.layout import rung
from shardjax.embed.policies import ShowClick
from shardjax.embed.residents import Residents, survey

_STEP = 4096  # keys that the index makes room for at a time


@dataclass
class TableDraft:
    """One table's unique keys of a batch.

    Attributes:
      table: which.
      unique: how many keys.
      new: how many of them have no row anywhere.
      entries: int32 [unique], of the index; good until it changes.
      where: int64 [unique], what the index says of each, once it has been asked; -1 for a
        key that stays without a row.
      owners: int32 [unique], likewise; of a key without a row it may be any.
      slots: int32 [unique], once they are settled.
      local_count: int32 [requesters], unique keys of each.
      local_unique: per requester, int32 [..], which those are.
      own_position: int32 [unique], place in what the owner gathers.
      asked: keys without a row that ask for one, their occurrences in the batch, and
        which get it: uint64, int64 and bool [n]; None if nobody has to ask.
    """

    table: Table
    unique: int
    new: int
    entries: np.ndarray
    local_count: np.ndarray
    local_unique: list[np.ndarray]
    where: np.ndarray = field(init=False)
    owners: np.ndarray = field(init=False)
    slots: np.ndarray = field(init=False)
    own_position: np.ndarray = field(init=False)
    asked: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __post_init__(self):
        self.where = np.zeros(self.unique, np.int64)
        self.owners = np.zeros(self.unique, np.int32)
        self.slots = np.empty(self.unique, np.int32)
        self.own_position = np.empty(self.unique, np.int32)


@dataclass
class Draft:
    """A batch before its rows have slots.

    Attributes:
      examples: per requester, padding included.
      inputs: features by name.
      raws: by feature, int32: position of each id among its requester's unique keys of
        the table, or NO_ROW, or DROPPED.
      tables: per group, per table.
      counters: what the batch had, by name.
      ends: per group, rows that are to come in the window after this batch.
      clicks: float64 [batch], labels of the examples; None if no table counts them.
    """

    examples: int
    inputs: dict[str, Input]
    raws: dict[str, np.ndarray]
    tables: list[list[TableDraft]]
    counters: dict[str, float]
    ends: list[int] = field(default_factory=list)
    clicks: np.ndarray | None = None

    def occurrences(self, table: TableDraft) -> np.ndarray:
        """How often the batch has each unique key of a table, int64 [unique]."""

        def amounts(x: Input) -> np.ndarray:
            return np.ones(len(x.keys), np.int64) if x.counts is None else x.counts

        return self._sum(table, amounts)

    def scores(self, table: TableDraft, policy: ShowClick) -> np.ndarray:
        """What each unique key's ShowClick score grows by, int64 [unique]."""
        each = None if self.clicks is None else scores_of(self.clicks, policy)

        def amounts(x: Input) -> np.ndarray:
            if x.scores is not None:
                return x.scores
            assert each is not None
            return each if x.lengths is None else np.repeat(each, x.lengths)

        return self._sum(table, amounts)

    def _sum(self, table: TableDraft, amounts: Callable[[Input], np.ndarray]):
        """Sums amounts of the ids of a table, int64 [n], by unique key."""
        out = np.zeros(table.unique, np.int64)
        for name in table.table.features:
            x = self.inputs[name]
            each = amounts(x)
            for r, unique in enumerate(table.local_unique):
                part = slice(x.bounds[r], x.bounds[r + 1])
                kernels.tally(unique, self.raws[name][part], each[part], out)
        return out

    def hide(self, table: TableDraft, hidden: np.ndarray) -> int:
        """Makes ids of some unique keys of a table read no row; returns how many ids."""
        count = 0
        for name in table.table.features:
            x = self.inputs[name]
            for r, unique in enumerate(table.local_unique):
                own = slice(x.bounds[r], x.bounds[r + 1])
                part = self.raws[name][own]
                before = part >= 0
                ids = kernels.hide(hidden, unique, part)
                if x.counts is not None:
                    ids = int(x.counts[own][before & (part < 0)].sum())
                count += ids
        return count

    def unseen(self, table: TableDraft, ids: int) -> int:
        """How many ids `ids` are that found no row, where they stand for several."""
        counted = [self.inputs[name] for name in table.table.features]
        if not ids or any(x.counts is None for x in counted):
            return ids
        return sum(
            int(x.counts[self.raws[name] == kernels.NO_ROW].sum())
            for name, x in zip(table.table.features, counted, strict=True)
            if x.counts is not None
        )


def scores_of(clicks: np.ndarray, policy: ShowClick) -> np.ndarray:
    """What each example's keys' ShowClick scores grow by, int64 [batch]."""
    each = policy.click_weight * clicks + policy.show_weight * (1 - clicks)
    return np.rint(each * UNIT).astype(np.int64)


class TableState:
    """A table's index, and scratch memory for the batch being looked up.

    Attributes:
      rows: keys that have a row somewhere.
      gate: decides which keys get one.
      is_counted: whether its rows are in the counters; several processes count those of a
        replicated table once.
    """

    def __init__(
        self,
        number: int,
        table: Table,
        requesters: int,
        seed: np.uint64,
        is_counted: bool = True,
    ):
        self.number = number
        self.is_counted = is_counted
        self.gate = Gate(table.spec.admit, seed)
        self.table = table
        self.index = Index()
        self.rows = 0
        self.requesters = requesters
        self.counters = np.zeros(kernels.N_COUNTERS, np.int64)
        self.local_count = np.zeros(requesters, np.int32)
        self._scratch = -1  # ids there is room for

    def begin(self, ids: int) -> None:
        """Makes room for a batch with `ids` ids."""
        if ids > self._scratch:
            self._scratch = rung(ids, 1024)
            n, p = self._scratch, self.requesters
            self.unique_entry = np.empty(n, np.int32)
            self.local_position = np.empty((n, p), np.int32)
            self.local_unique = np.empty((p, n), np.int32)
        self.counters[:] = 0
        self.counters[kernels.COUNT] = self._known = self.index.count
        self.local_count[:] = 0

    def look_up(self, inputs: Mapping[str, Input], insert: bool):
        """Looks up the features that read the table.

        Returns:
          By feature, the position of each id; and what is wrong, a list of texts.
        """
        self.begin(sum(len(inputs[f].keys) for f in self.table.features))
        found, problems = {}, []
        bad = 0
        for name in self.table.features:
            x = inputs[name]
            self.counters[kernels.BAD] = 0
            found[name] = self._translate(x, insert)
            count = int(self.counters[kernels.BAD])
            bad += count
            if count and x.spec.on_bad_id == "error":
                value = int(x.keys[self.counters[kernels.FIRST_BAD]].astype(np.int64))
                spec = self.table.spec
                problems.append(
                    f"feature {name!r}: {count} ids outside the vocabulary [0,"
                    f" {spec.vocabulary}) of table {spec.name!r}, the first is {value}."
                    " Enlarge `vocabulary`, or set `on_bad_id` of the feature to 'zero' or"
                    " 'drop'"
                )
        self.counters[kernels.BAD] = bad
        return found, problems

    def _translate(self, x: Input, insert: bool) -> np.ndarray:
        """Runs the kernel over one feature, growing the index where needed."""
        raw = np.empty(len(x.keys), np.int32)
        spec = x.spec
        bad_row = kernels.DROPPED if spec.on_bad_id == "drop" else kernels.NO_ROW
        start = 0
        while True:
            self.counters[kernels.LIMIT] = self.index.limit
            start = int(kernels.translate(
                x.keys, x.bounds, start, raw, self.index.table, self.index.homes,
                self.counters, self.unique_entry, self.local_position,
                self.local_unique, self.local_count, self.table.salt, insert,
                np.uint64(self.table.spec.vocabulary or 0), bad_row,
                np.uint64((spec.padding_id or 0) % 2**64), spec.padding_id is not None,
            ))  # fmt: skip
            self.index.count = int(self.counters[kernels.COUNT])
            if start == len(raw):
                return raw
            count = self.index.count
            more = min(len(raw) - start, count, _STEP)
            self.index.reserve(count + more, self.unique_entry[: self.unique])

    @property
    def unique(self) -> int:
        """Unique keys of the batch."""
        return int(self.counters[kernels.UNIQUE])

    def draft(self) -> TableDraft:
        """The look-up's result in memory of its own."""
        n = self.unique
        local = [
            x[:c].copy()
            for x, c in zip(self.local_unique, self.local_count, strict=True)
        ]
        return TableDraft(
            self.table, n, self.index.count - self._known, self.unique_entry[:n].copy(),
            self.local_count.copy(), local,
        )  # fmt: skip

    def survey(
        self,
        draft: TableDraft,
        residents: Residents,
        first_step: int,
        needed: np.ndarray,
    ) -> None:
        """Asks the index where a draft's rows are; see `residents.survey`."""
        survey(
            self.index.table, draft.entries, draft.unique, self.table.owner,
            residents.span.total, residents.span.first, first_step, residents.slots,
            residents.words, draft.where, draft.owners, needed,
        )  # fmt: skip

    def new(self, draft: TableDraft) -> tuple[np.ndarray, np.ndarray]:
        """The keys that the look-up has brought, in the order of the batch.

        Returns:
          Their numbers among the unique keys, int64 [n], and they, salted, uint64 [n].
        """
        kept = np.flatnonzero(draft.where >= 0)
        new = kept[self.index.codes(draft.entries[kept]) == NEW]
        return new, self.index.table[draft.entries[new], 0]

    def beyond(
        self, draft: TableDraft, known: int = 0, on_disk: np.ndarray | None = None
    ) -> np.ndarray | None:
        """The new keys that the table has no room for, bool [unique], or None.

        Args:
          draft: of the table.
          known: how many of `rows` are counted twice: taken for new, and on disk.
          on_disk: bool [new keys], which of `new` are on disk, so have a row.
        """
        room = max(self.table.spec.max_rows - self.rows + known, 0)
        if draft.new <= room:
            return None
        new, _ = self.new(draft)
        if on_disk is not None:
            new = new[~on_disk]
        if len(new) <= room:
            return None
        hidden = np.zeros(draft.unique, bool)
        hidden[new[room:]] = True
        return hidden

    def drop(self, draft: TableDraft, hidden: np.ndarray) -> None:
        """Takes new keys out of a draft, which stay without a row."""
        stay = np.flatnonzero(draft.where >= 0)
        keys = self.index.table[draft.entries[stay], 0]
        self.index.remove(keys[hidden[stay]])
        entries = np.empty(len(stay), np.int32)
        find_entries(self.index.table, self.index.homes, keys, entries)
        draft.entries[stay] = entries
        draft.where[hidden] = -1
        draft.new -= int(hidden.sum())

    def forget_new(self, draft: TableDraft) -> None:
        """Forgets those keys of a draft that the look-up has brought."""
        self.index.remove(self.new(draft)[1])

"""The requesters' half of planning, where rows belong to several processes.

A process looks up its own examples' keys only to tell equal ones from others: for each of
its devices the unique keys, in the order in which the batch first names them, and the
device that owns each. What the owners know of the keys comes later.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from shardjax.embed import translate as kernels
from shardjax.embed.draft import TableDraft, TableState, scores_of
from shardjax.embed.drafting import check_clicks, plan_error
from shardjax.embed.eviction import MOST_TALLY
from shardjax.embed.groups import Group
from shardjax.embed.inputs import Input, count_inputs, normalize
from shardjax.embed.jagged import Jagged
from shardjax.embed.messages import Block, write_keys
from shardjax.embed.routes import RequesterRoutes
from shardjax.embed.span import DeviceSpan
from shardjax.embed.spec import FeatureSpec
from shardjax.embed.translate import owners_of


@dataclass(eq=False)
class Wanted:
    """One table's unique keys that a batch of this process has.

    Attributes:
      draft: what the look-up found; its owners are devices of all processes.
      keys: uint64 [unique], as users know them.
      amounts: per requester, how many ids each of its unique keys stands for, and what its
        score grows by, int64 [..] each; empty where nobody asks.
      places: per requester, int32 [..]: place of each of its unique keys within what the
        owner sends; none for a replicated table.
    """

    draft: TableDraft
    keys: np.ndarray
    amounts: list[tuple[np.ndarray, ...]]
    places: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """A batch of this process, ready to ask for its rows.

    Attributes:
      examples: per device, padding included.
      tables: per group, per table.
      routes: per group.
      counters: what the batch has, by name.
      needs: the least static sizes, by group number and name.
      rooms: per group, keys that a message needs room for.
    """

    examples: int
    tables: list[list[Wanted]]
    routes: list[RequesterRoutes]
    counters: dict[str, float]
    needs: dict[tuple, int]
    rooms: list[int]


class Requester:
    """Looks up the batches of this process.

    Args:
      groups, features: of the collection.
      span: the devices, and which are this process's.
      seed: as of `TableState`.
      threads: that look up keys, one table each.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        features: Mapping[str, FeatureSpec],
        span: DeviceSpan,
        seed: np.uint64,
        threads: int = 1,
    ):
        self._groups, self._features, self._span = groups, features, span
        self._states = [
            [TableState(n, t, span.count, seed) for n, t in enumerate(g.tables)]
            for g in groups
        ]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def amounts(self, group: int, train: bool) -> int:
        """Words beside each key that the owners of a group ask for; see `Block`."""
        tables = self._groups[group].tables
        if train and any(t.spec.show_click is not None for t in tables):
            return 2
        states = self._states[group]
        counted = any(
            not s.gate.is_open or s.table.spec.capacity is not None for s in states
        )
        return int(counted or not train)

    def ask(
        self,
        features: Mapping[str, np.ndarray | Jagged],
        batch: int,
        clicks: np.ndarray | None,
        examples: int,
        train: bool,
        dealt: int | None = None,
    ) -> Request:
        """Looks up the examples of this process in a batch.

        Args:
          features, batch, clicks: as of `Planner.plan`, of this process.
          examples: per device, padding included; the same in all processes.
          train: whether it is to be trained on.
          dealt: as of `JointBatch`.

        Raises:
          PlanError, ValueError, TypeError: as of `Planner.plan`.
        """
        span = self._span
        each = examples if dealt is None else dealt
        if each > examples:
            raise ValueError(
                f"`dealt` must not exceed the room of a device, {examples} examples, got"
                f" {each}. Give the Loader a BlockShare, whose parts have enough"
            )
        if batch > each * span.count:
            raise ValueError(
                f"a process with {span.count} devices takes up to"
                f" {each * span.count} examples of a batch, {each} per device, got"
                f" {batch}. Give all processes the same share"
            )
        clicks = check_clicks(clicks, batch, self._states) if train else None
        inputs = normalize(features, self._features, batch, each, span.count)
        counters = {"examples": batch, "bad_ids": 0, "unique_ids": 0}
        counters |= count_inputs(inputs, features)
        states = [s for states in self._states for s in states]
        run = self._pool.map if self._pool else map
        try:
            results = list(run(lambda s: s.look_up(inputs, True), states))
            tables = [
                [self._wanted(s, group) for s in states]
                for group, states in zip(self._groups, self._states, strict=True)
            ]
        finally:
            for s in states:
                s.index.clear()
        problems = [p for _, more in results for p in more]
        if problems:
            raise plan_error(problems)
        raws = {name: raw for found, _ in results for name, raw in found.items()}
        for s in states:
            counters["bad_ids"] += int(s.counters[kernels.BAD])
            counters["padding_ids"] += int(s.counters[kernels.PADDING])
            counters["unique_ids"] += int(s.local_count.sum())
        return self._request(examples, inputs, raws, tables, counters, clicks, train)

    def _wanted(self, state: TableState, group: Group) -> Wanted:
        draft = state.draft()
        salted = state.index.table[draft.entries, 0]
        span = DeviceSpan.whole(1 if group.replicated else self._span.total)
        draft.owners = owners_of(salted, state.table.owner, span)
        return Wanted(draft, salted - state.table.salt, [])

    def _request(
        self, examples, inputs, raws, tables, counters, clicks, train
    ) -> Request:
        routes, needs, rooms = [], {}, []
        for g, (group, members) in enumerate(zip(self._groups, tables, strict=True)):
            made = RequesterRoutes(
                group, self._features, inputs, raws, self._span.count, examples
            )
            routes.append(made)
            needs |= {(g, *name): n for name, n in made.needs().items()}
            room, send = self._place(group, members)
            needs[g, "send"] = send
            rooms.append(room)
            amounts = self.amounts(g, train)
            for wanted in members:
                wanted.amounts = [
                    self._amounts(wanted, inputs, raws, r, clicks, amounts)
                    for r in range(self._span.count)
                ]
        return Request(examples, tables, routes, counters, needs, rooms)

    def _place(self, group: Group, members: Sequence[Wanted]) -> tuple[int, int]:
        """Places keys in what owners send; returns how many a message has, and of those
        how many are sent."""
        count = self._span.count
        if group.replicated:
            longest = int(np.sum([w.draft.local_count for w in members], 0).max())
            return -(-longest // count), 0
        send_count = np.zeros((count, self._span.total), np.int32)
        for wanted in members:
            draft = wanted.draft
            for r in range(count):
                place = np.empty(draft.local_count[r], np.int32)
                kernels.route(
                    draft.local_unique[r], draft.local_count[r], draft.owners,
                    send_count[r], place,
                )  # fmt: skip
                wanted.places.append(place)
        most = int(send_count.max())
        return most, most

    def _amounts(
        self, wanted: Wanted, inputs: Mapping[str, Input], raws, r: int, clicks, n: int
    ) -> tuple[np.ndarray, ...]:
        """What a requester's unique keys of a table stand for; `n` kinds of amounts."""
        if not n:
            return ()
        table = wanted.draft.table
        policy = table.spec.show_click
        out = np.zeros((n, int(wanted.draft.local_count[r])), np.int64)
        for name in table.features:
            x = inputs[name]
            own = slice(x.bounds[r], x.bounds[r + 1])
            part = raws[name][own]
            kept = part >= 0
            out[0] += np.bincount(part[kept], minlength=out.shape[1])
            if n > 1 and policy is not None:
                each = scores_of(clicks, policy)
                if x.lengths is not None:
                    each = np.repeat(each, x.lengths)
                np.add.at(out[1], part[kept], each[own][kept])
        return tuple(np.minimum(out, MOST_TALLY))

    def write(
        self, request: Request, blocks: Sequence[Block], messages: np.ndarray
    ) -> None:
        """Writes a request into messages.

        Args:
          request: of this process.
          blocks: of each group.
          messages: int32 [devices of this process, all devices, words], in and out.
        """
        span = self._span
        for group, members, block in zip(
            self._groups, request.tables, blocks, strict=True
        ):
            for r in range(span.count):
                used = np.zeros(span.total, np.int64)
                dealt = 0
                for t, wanted in enumerate(members):
                    draft = wanted.draft
                    own = draft.local_unique[r]
                    keys, amounts = wanted.keys[own], wanted.amounts[r]
                    counts, scores = (*amounts, *[np.zeros(0, np.int64)] * 2)[:2]
                    if not group.replicated:
                        owners = [draft.owners[own]]
                    else:  # to every process, in turn to its devices
                        turn = (dealt + np.arange(len(own))) % span.count
                        starts = range(0, span.total, span.count)
                        owners = [(turn + start).astype(np.int32) for start in starts]
                        dealt += len(own)
                    for each in owners:
                        write_keys(
                            block, t, keys, each, counts, scores, used, messages[r]
                        )

    def where(
        self, request: Request, group: int, send: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where requesters find the rows they get, as of `OwnerRoutes.write`.

        Args:
          request: of this process.
          group: that is not replicated.
          send: rows of each owner, padding included.
        """
        members, count = request.tables[group], self._span.count
        counts = np.array([w.draft.local_count for w in members])
        base = np.zeros((len(members), count), np.int32)
        base[1:] = np.cumsum(counts, 0)[:-1]
        where = np.empty((count, max(int(counts.sum(0).max()), 1)), np.int32)
        for t, wanted in enumerate(members):
            for r, place in enumerate(wanted.places):
                owners = wanted.draft.owners[wanted.draft.local_unique[r]]
                at = base[t, r]
                where[r, at : at + len(place)] = owners * send + place
        return base, where

"""Planning where the devices belong to several processes.

Each process looks up the keys of its own examples, and each knows the rows of its own
devices alone. A window is planned in three parts, of which only the second touches the
devices::

    ask      unique keys of this process's examples; sizes of messages are agreed
    send     the keys travel to the devices that own them: one all_to_all
    answer   owners give rows slots, as `Planner` does; static sizes are agreed

What is agreed goes through the host (`agree`: each process gives bytes, and gets those of
all), so `ask` and `answer` can run in any thread. `send` dispatches a device program, so
all processes must call it at the same place of their programs, in the main thread.

The owners' part is a `Planner` of its own whose batches are the messages: one "example" per
requester device, with the keys that it asks for. So tiers, policies and all else are those
of one process, and sums follow the same order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardjax.embed.drafting import PlanError
from shardjax.embed.groups import Group
from shardjax.embed.inputs import AskedKeys
from shardjax.embed.jagged import Jagged
from shardjax.embed.layout import rung
from shardjax.embed.messages import Block, lay_out, read_keys
from shardjax.embed.plan import Plan, Planner, Settled, WindowBatch
from shardjax.embed.policies import LFU, LRU
from shardjax.embed.requests import Request, Requester
from shardjax.embed.span import DeviceSpan
from shardjax.embed.spec import FeatureSpec, TableSpec
from shardjax.together import Agree, agree_on, error_text

_LARGEST = ("exchange_imbalance", "windows", "shortened_windows")


class Abandoned(Exception):
    """Nobody waits for the plans of a window any more."""


@dataclass(frozen=True)
class JointBatch:
    """This process's part of a batch.

    Attributes:
      features: as of `Planner.plan`, of this process's examples.
      size: how many those are; they may be none.
      examples: per device, padding included, the same in all processes.
      clicks: as of `Planner.plan`, of this process's examples.
      dealt: that each device of this process gets before the next one gets any; None for
        as many as there is room for.
      form: what else must be the same of a batch in all processes, by what it is called.
    """

    features: Mapping[str, np.ndarray | Jagged]
    size: int
    examples: int
    clicks: np.ndarray | None = None
    dealt: int | None = None
    form: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Ask:
    """A window between its three parts.

    Attributes:
      train, admit: as of `JointPlanner.ask`.
      requests: its batches, of this process.
      blocks: per batch and group, where its keys are in the messages.
      needs: per batch, the static sizes of the requesters that all have agreed on.
      messages: int32 [own devices, all devices, words], to be sent.
      error: of a batch after these, to be raised after them.
      received: waits for the messages to this process's owners, int32 [own devices, all
        devices, words]; set by `sent`.
    """

    train: bool
    admit: bool
    requests: list[Request]
    blocks: list[list[Block]]
    needs: list[dict[tuple, int]]
    messages: np.ndarray
    error: Exception | None
    began: float
    received: Callable[[], np.ndarray] | None = None
    _settled: threading.Event = field(default_factory=threading.Event)

    def sent(self, received: Callable[[], np.ndarray]) -> None:
        """Notes that the messages are on their way."""
        self.received = received
        self._settled.set()

    def abandon(self) -> None:
        """Nobody will send it."""
        self._settled.set()

    def wait(self) -> np.ndarray:
        """The messages to this process's owners.

        Raises:
          Abandoned: if nobody will send them.
        """
        self._settled.wait()
        if self.received is None:
            raise Abandoned
        return self.received()


class JointPlanner:
    """Plans windows together with the other processes.

    Args:
      groups, features: of the collection.
      span: the devices, and which are this process's; all have equally many.
      seed, threads: as of `Planner`.

    Attributes:
      core: the planner of this process's rows.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        features: Mapping[str, FeatureSpec],
        span: DeviceSpan,
        seed: int,
        threads: int = 1,
    ):
        if span.total % span.count:
            raise ValueError(
                f"all processes must have equally many devices, got {span.count} of"
                f" {span.total} in this one"
            )
        self._groups, self._span = tuple(groups), span
        processes = span.total // span.count
        own_groups = tuple(_owned(g, processes) for g in groups)
        own_features = {
            t.spec.name: FeatureSpec(t.spec) for g in own_groups for t in g.tables
        }
        self.core = Planner(own_groups, own_features, span.total, seed, threads, span)
        self._requester = Requester(groups, features, span, np.uint64(0), threads)

    def examples(self, size: int, train: bool) -> int:
        """Examples per device for a batch of `size` examples in all: never fewer than a
        batch before had."""
        needed = -(-size // self._span.total)
        return self.core.size(train, ("examples",), needed, needed)

    def common_examples(self, size: int, agree: Agree, train: bool) -> int:
        """Examples per device for a batch of which this process has `size`, and the others
        whatever they have."""
        own = -(-size // self._span.count)
        needed = max(x["needed"] for x in agree_on(agree, {"needed": own}))
        return self.core.size(train, ("examples",), needed, needed)

    def ask(
        self,
        batches: Sequence[JointBatch],
        agree: Agree,
        *,
        train: bool,
        admit: bool = False,
    ) -> Ask:
        """Looks up the keys of this process's part of a window.

        Args:
          batches: as many as in the other processes.
          agree: with the other processes.
          train: whether they are to be trained on.
          admit: as of `Planner.plan`.

        Raises:
          PlanError: if the processes have different numbers of batches or examples, or
            features or batches in another form.
        """
        began = time.perf_counter()
        requests, error = [], None
        for batch in batches:
            try:
                requests.append(
                    self._requester.ask(
                        batch.features,
                        batch.size,
                        batch.clicks,
                        batch.examples,
                        train,
                        batch.dealt,
                    )
                )
            except Exception as problem:  # whatever it is, it is this batch's
                error = problem
                break
        found = agree_on(
            agree,
            {
                "batches": len(batches),
                "examples": [batch.examples for batch in batches],
                "kinds": [_kinds(r) for r in requests],
                "forms": [dict(batch.form) for batch in batches],
                "needs": [_listed(r.needs) for r in requests],
                "rooms": [r.rooms for r in requests],
                "error": None if error is None else error_text(error),
            },
        )
        for name in ("batches", "examples"):
            values = [x[name] for x in found]
            if any(x != values[0] for x in values):
                raise PlanError(
                    f"all processes must plan the same {name} of a window, got by process"
                    f" {values}. Give each its share of the same batches: a Loader with the"
                    " same batch size in all processes does so"
                )
        common = min(len(x["needs"]) for x in found)
        error = _common_error(found, common, error, len(requests))
        requests = requests[:common]
        for n in range(common):
            _check_kinds([x["kinds"][n] for x in found])
            _check_forms([x["forms"][n] for x in found])
        groups = range(len(self._groups))
        rooms = np.array([x["rooms"][:common] for x in found], np.int64)
        rooms = rooms.reshape(len(found), common, len(groups)).max(0)
        amounts = [self._requester.amounts(g, train) for g in groups]
        flat = lay_out(
            [
                (len(self._groups[g].tables), int(rooms[n, g]), amounts[g])
                for n in range(common)
                for g in groups
            ]
        )
        blocks = [flat[n * len(groups) : (n + 1) * len(groups)] for n in range(common)]
        words = rung(flat[-1].end if flat else 1, 1024)
        shape = self._span.count, self._span.total, words
        messages = np.zeros(shape, np.int32)
        for request, own in zip(requests, blocks, strict=True):
            self._requester.write(request, own, messages)
        needs = [
            _largest([_unlisted(x["needs"][n]) for x in found]) for n in range(common)
        ]
        return Ask(train, admit, requests, blocks, needs, messages, error, began)

    def answer(self, ask: Ask, agree: Agree) -> list[Plan]:
        """Plans a window whose messages have been sent.

        Returns:
          The plans of `ask.requests`; then `ask.error` is to be raised, if there is one.

        Raises:
          PlanError: if a process cannot plan it, such as for a full table; of a window to
            train on none can go on then.
          Abandoned: as of `Ask.wait`.
        """
        if not ask.requests:
            return []
        messages = ask.wait()
        core = self.core
        batches: deque[WindowBatch] = deque(
            self._received(ask, n, messages) for n in range(len(ask.requests))
        )
        with core.planning:
            settled: list[Settled] = []
            error = None
            while batches and error is None:
                try:
                    if ask.train:
                        more, error = core.settle_window(batches, admit=ask.admit)
                        settled += more
                    else:
                        features, requesters, *_ = batches.popleft()
                        settled.append(core.settle_evaluation(features, requesters))
                except Exception as problem:  # the others must not wait for it
                    error = problem
            try:
                return self._finish(ask, settled, error, agree)
            except BaseException:
                core.abandon(settled)
                raise

    def _received(
        self, ask: Ask, n: int, messages: np.ndarray
    ) -> tuple[dict[str, AskedKeys], int]:
        """What all requesters ask this process for in a batch, as `plan_window` has it."""
        features: dict[str, AskedKeys] = {}
        for group, block in zip(self._groups, ask.blocks[n], strict=True):
            for t, table in enumerate(group.tables):
                features[table.spec.name] = read_keys(
                    block, t, messages, group.replicated
                )
        return features, self._span.total

    def _finish(
        self, ask: Ask, settled: list[Settled], error: Exception | None, agree: Agree
    ) -> list[Plan]:
        """Agrees on what is left to agree on, and writes the plans."""
        routes = [self.core.owner_routes(s) for s in settled]
        loads = [sum(r.send_count.sum(0) for r in own) for own in routes]
        found = agree_on(
            agree,
            {
                "needs": [
                    _listed(
                        {
                            (g, *k): v
                            for g, r in enumerate(own)
                            for k, v in r.needs().items()
                        }
                    )
                    for own in routes
                ],
                "slots": [[int(x.max()) for x in s.used] for s in settled],
                "loads": [np.asarray(x).tolist() for x in loads],
                "counters": [
                    s.draft.counters | r.counters | {"rows": self._rows(s)}
                    for s, r in zip(settled, ask.requests, strict=False)
                ],
                "sequences": [s.sequence for s in settled],
                "error": None if error is None else error_text(error),
            },
        )
        if any(x["error"] is not None for x in found):
            problem = _common_error(found, -1, error, -1)
            assert problem is not None
            if ask.train:
                with self.core.breaking():
                    raise problem
            raise problem
        values = [x["sequences"] for x in found]
        if any(x != values[0] for x in values):
            raise RuntimeError(
                "the processes of a run have planned different batches: their plans have"
                f" the numbers {values}. Start anew from the last checkpoint"
            )
        plans = []
        for n, (request, own) in enumerate(zip(ask.requests, routes, strict=True)):
            needs = _largest([ask.needs[n], *(_unlisted(x["needs"][n]) for x in found)])
            counters = _summed([x["counters"][n] for x in found])
            load = np.concatenate([x["loads"][n] for x in found])
            if load.mean():
                counters["exchange_imbalance"] = float(load.max() / load.mean())
            slots = np.max([x["slots"][n] for x in found], 0).tolist()
            plans.append(
                self._arrange(request, settled[n], own, needs, counters, slots)
            )
        if ask.train:
            return self.core.wait_for(plans, ask.began)
        seconds = (time.perf_counter() - ask.began) / len(plans)
        return [replace(plan, seconds=seconds) for plan in plans]

    def _rows(self, settled: Settled) -> int:
        """Unique rows of a batch that this process counts."""
        return sum(
            table.unique
            for states, tables in zip(
                self.core.tables, settled.draft.tables, strict=True
            )
            for state, table in zip(states, tables, strict=True)
            if state.is_counted
        )

    def _arrange(
        self, request: Request, settled: Settled, owners, needs, counters, slots
    ) -> Plan:
        """The plan of a batch on this process's devices."""
        arrays: dict[str, np.ndarray] = {}
        layouts = []
        span = self._span
        for g, (owner, requester) in enumerate(
            zip(owners, request.routes, strict=True)
        ):

            def size(name, needed, least, g=g):
                agreed = max(needs.get((g, *name), 0), needed)
                return self.core.size(settled.train, (g, *name), agreed, least)

            rows, stored, send, base, where = owner.write(arrays, size)
            if owner.exchanges:
                base, where = self._requester.where(request, g, send)
            else:
                own = slice(span.first, span.first + span.count)
                base, where = base[:, own].copy(), where[own]
            layout = requester.layout(rows, stored, send, size)
            missing = layout.received(span.total)
            requester.write(layout, missing, base, where, arrays)
            layouts.append(layout)
        rows = sum(x.rows * (1 if x.replicated else span.total) for x in layouts)
        counters["padding_rows"] = rows - counters.pop("rows")
        return Plan(
            request.examples,
            tuple(layouts),
            arrays,
            settled.moves,
            settled.used,
            settled.sequence,
            settled.version,
            counters,
            slots_needed=tuple(slots),
        )


def _owned(group: Group, processes: int) -> Group:
    """A group whose tables are read under their own names, with this process's share of
    the rows that they may have."""
    tables = tuple(
        replace(
            table,
            spec=table.spec if group.replicated else _share(table.spec, processes),
            features=(table.spec.name,),
        )
        for table in group.tables
    )
    return replace(group, tables=tables)


def _share(spec: TableSpec, processes: int) -> TableSpec:
    capacity = spec.capacity
    if capacity is not None:
        capacity = -(-capacity // processes)
    evict: Any = tuple(
        replace(policy, rows=-(-policy.rows // processes))
        if isinstance(policy, LRU | LFU)
        else policy
        for policy in spec.evictions
    )
    return replace(spec, capacity=capacity, evict=evict or spec.evict)


def _kinds(request: Request) -> dict[str, str]:
    """How each feature of a batch comes."""
    return {k: v for routes in request.routes for k, v in routes.kinds.items()}


def _check_kinds(found: Sequence[Mapping[str, str]]) -> None:
    """Raises for a feature that comes in another form in another process."""
    for name, kind in found[0].items():
        for process, other in enumerate(found):
            if other[name] != kind:
                raise PlanError(
                    f"feature {name!r} must come in the same form in all processes, got"
                    f" {kind} in process 0 and {other[name]} in process {process}. Wrap it"
                    " in shardjax.embed.Jagged in all of them, or in none"
                )


def _check_forms(found: Sequence[Mapping[str, Any]]) -> None:
    """Raises for batches that have another form in another process."""
    for process, other in enumerate(found):
        for name in {**found[0], **other}:
            first, here = found[0].get(name), other.get(name)
            if first != here:
                raise PlanError(
                    f"batches must have the same {name} in all processes, got {first} in"
                    f" process 0 and {here} in process {process}. Give all of them data of"
                    " the same columns"
                )


def _listed(needs: Mapping[tuple, int]) -> list:
    return [[list(key), int(n)] for key, n in needs.items()]


def _unlisted(needs: list) -> dict[tuple, int]:
    def as_key(x):
        return tuple(map(as_key, x)) if isinstance(x, list) else x

    return {as_key(key): n for key, n in needs}


def _largest(parts: Sequence[Mapping[tuple, int]]) -> dict[tuple, int]:
    out: dict[tuple, int] = {}
    for part in parts:
        for key, n in part.items():
            out[key] = max(out.get(key, 0), n)
    return out


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Counters of all processes as one."""
    out: dict[str, float] = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            more = max if name in _LARGEST else float.__add__
            out[name] = type(value)(more(float(out.get(name, 0)), float(value)))
    return out


def _common_error(
    found: Sequence[Mapping[str, Any]], common: int, own: Exception | None, planned: int
) -> Exception | None:
    """The error that ends a window in all processes, if one does: this process's own, or
    one that says whose it is."""
    if own is not None and planned == common:
        return own
    for process, value in enumerate(found):
        failed = common < 0 or len(value["needs"]) == common
        if value["error"] is not None and failed:
            return PlanError(
                f"process {process} could not plan its part of a batch: {value['error']}"
            )
    return None

"""Plans of windows that follow one another, made ahead together with other processes."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from shardjax.embed.joint import Ask, JointBatch, JointPlanner
from shardjax.embed.plan import Plan
from shardjax.errands import Errand


class Agreement(Protocol):
    """Gives all processes values in rounds, such as `shardjax.processes.Channel`."""

    def exchange(self, value: bytes) -> list[bytes]: ...

    def close(self) -> None: ...


class PlanStream:
    """An iterator over plans, in order, and errands among them.

    A window's keys are sent before the steps of the window before it are taken, so its plan
    is made while these run::

        ask 1 | send 1 | ask 2 | send 2 | answer 1: plans 1 | ask 3 | send 3 | ...

    `next` may be called in any thread; the errands have to be run in the main thread of each
    process, each before what follows it here is used.

    Args:
      joint: plans windows.
      send: dispatches an ask.
      agreement: with the other processes, for this stream alone.
      windows: batches, as many as in the other processes.
      train: whether they are to be trained on.
    """

    def __init__(
        self,
        joint: JointPlanner,
        send: Callable[[Ask], None],
        agreement: Agreement,
        windows: Iterable[Sequence[JointBatch]],
        *,
        train: bool,
    ):
        self._joint, self._send, self._agreement = joint, send, agreement
        self._asked: deque[Ask] = deque()
        self._lock = threading.Lock()
        self._abandoned = False
        self._plans = self._run(windows, train)

    def __iter__(self) -> "PlanStream":
        return self

    def __next__(self) -> Plan | Errand:
        return next(self._plans)

    def _run(self, windows, train: bool) -> Iterator[Plan | Errand]:
        for window in windows:
            ask = self._joint.ask(window, self._agreement.exchange, train=train)
            with self._lock:
                self._asked.append(ask)
                if self._abandoned:
                    ask.abandon()
            yield Errand(lambda ask=ask: self._send(ask))
            if len(self._asked) > 1:
                yield from self._answer()
        while self._asked:
            yield from self._answer()
        self._agreement.close()

    def _answer(self) -> Iterator[Plan]:
        ask = self._asked[0]
        plans = self._joint.answer(ask, self._agreement.exchange)
        self._asked.popleft()
        yield from plans
        if ask.error is not None:
            raise ask.error

    def abandon(self) -> None:
        """Nobody takes plans any more: a `next` that waits for other processes ends."""
        with self._lock:
            self._abandoned = True
            for ask in self._asked:
                ask.abandon()
        self._agreement.close()

"""When a run saves: every so many steps, every so much time, or as often as is cheap."""

import logging
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Literal

from shardjax.checkpoint.figures import (
    LEAST_STEPS,
    AutoInterval,
    Average,
    cost_of,
    jumped,
    merge as merge,
)

_log = logging.getLogger(__name__)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ALLOWED = (
    "'auto', 'none', a number of steps such as 500, or a time in s, m, h or d such as"
    " '10m'"
)
_WINDOW = 64  # the last steps whose median is the time of a step
_RETRY_STEPS = 100  # between attempts to save that fail before any was measured


@dataclass(frozen=True)
class Interval:
    """How often a run saves; see `parse_interval`.

    Attributes:
      kind: "auto", "steps", "time" or "none".
      every: steps or seconds from one save to the next; 0 for "auto" and "none".
    """

    kind: Literal["auto", "steps", "time", "none"]
    every: float = 0

    def __str__(self) -> str:
        if self.kind == "steps":
            return str(self.every)
        if self.kind == "time":
            return f"{self.every:.6f}".rstrip("0").rstrip(".") + "s"
        return self.kind


def parse_interval(text: str | float | timedelta | Interval) -> Interval:
    """An interval from what a user writes.

    Args:
      text: "auto" to save as often as the overhead allows; 500 or "500" for every so
        many steps; "90s", "10m", "1.5h", "1d" or a timedelta for every so much time;
        "none" for saves only when asked for.

    Raises:
      TypeError, ValueError: for anything else.

    Example:
      >>> parse_interval("1.5h"), parse_interval(500)
      (Interval(kind='time', every=5400.0), Interval(kind='steps', every=500))
    """
    if isinstance(text, Interval):
        return _positive(text, str(text)) if text.kind in ("steps", "time") else text
    if isinstance(text, timedelta):
        return _positive(Interval("time", text.total_seconds()), text)
    if isinstance(text, bool) or not isinstance(text, str | Real):
        raise TypeError(f"The interval of saves must be {_ALLOWED}, got {text!r}")
    words = str(text).strip().lower()
    if words == "auto":
        return Interval("auto")
    if words == "none":
        return Interval("none")
    match = re.fullmatch(r"([+-]?\d{1,15}(?:\.\d+)?)\s*([a-z]*)", words)
    if not match or match[2] not in ("", *_UNITS):
        raise ValueError(f"The interval of saves must be {_ALLOWED}, got {text!r}")
    number = float(match[1])
    if match[2]:
        return _positive(Interval("time", number * _UNITS[match[2]]), text)
    if number != int(number):
        raise ValueError(
            f"The interval of saves must be a whole number of steps, got {text!r}."
            " For a time name its unit: s, m, h or d, such as '10m'"
        )
    return _positive(Interval("steps", int(number)), text)


def _positive(interval: Interval, text: object) -> Interval:
    if interval.every <= 0:
        raise ValueError(
            f"The interval of saves must be positive, got {text!r}. Write 'none' for no"
            " saves but those asked for"
        )
    return interval


class SavePolicy:
    """Decides at which steps a run saves.

    The training loop tells it what happens (`stepped`, `saved`, `written`, `failed`,
    `request`) and asks `next_step`. It starts no thread and reads no file, and one
    thread at a time may use it.

    "auto" is CheckFreq (Mohan et al., FAST'21) with estimates that follow the run. The
    interval is the smallest k that keeps within `max_overhead`, and in which a write
    ends before the next save. Once the first steps are over it saves to measure. After
    each save it raises k at once where the budget asks for it, and lowers k if a fifth
    less has been enough for a few saves.

    A save that failed is tried again as soon as possible, once, and then after a whole
    interval; with an interval in steps, at the next multiple. With "auto" and with a
    time, a save waits until the last one is written. A step that comes again (a run
    that goes back to a checkpoint) needs a new policy.

    Args:
      interval: an `Interval` or what `parse_interval` takes.
      max_overhead: "auto": the part of the time of the steps that saves may cost, by
        standing still and by slower steps while a save is written.
      mtbf: "auto": mean time between failures in seconds. Saves are then no further
        apart than Young and Daly advise, sqrt(2 * cost * mtbf), within the budget.
      warmup_steps: how many steps at the start are not timed, as they compile.
      ahead: how many steps are planned at a time, of which `next_step` must know.
      clock: seconds.

    Raises:
      TypeError, ValueError: if an argument is out of its range.

    Example:
      >>> policy = SavePolicy("auto", max_overhead=0.05, warmup_steps=0)
      >>> for step in range(1, 6):
      ...     policy.stepped(step, seconds=1.0)
      >>> policy.next_step(5)  # soon, in order to measure
      6
      >>> policy.saved(6, stall_s=0.5)
      >>> policy.written(6, write_s=4.0, slowed_s=0.1)
      >>> policy.next_step(16)  # nothing within sight
      >>> policy.next_step(17)  # 0.6 s are 5 % of 12 s
      18
    """

    def __init__(
        self,
        interval: Interval | str | float | timedelta,
        *,
        max_overhead: float = 0.035,
        mtbf: float | None = None,
        warmup_steps: int = 10,
        ahead: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not 0 < max_overhead < 1:
            raise ValueError(
                f"`max_overhead` must be between 0 and 1, got {max_overhead}. It is a"
                " part of the time of the steps: 0.035 for 3.5 %"
            )
        if mtbf is not None and not 0 < mtbf < math.inf:
            raise ValueError(
                f"`mtbf` must be a positive number of seconds, got {mtbf}. Give None if"
                " it is not known"
            )
        for name, value, least in (
            ("warmup_steps", warmup_steps, 0),
            ("ahead", ahead, 1),
        ):
            if value < least:
                raise ValueError(
                    f"`{name}` must be {least} or more, got {value}. Give a number of"
                    " steps"
                )
        self.interval = parse_interval(interval)
        self._warmup, self._ahead, self._clock = warmup_steps, ahead, clock
        self._seconds: deque[float] = deque(maxlen=_WINDOW)  # of the last steps
        self._busy: deque[float] = deque(maxlen=_WINDOW)  # those since a save, ...
        self._busy_steps = 0  # ... of so many, while it is written
        self._step_s: float | None = 0.0  # their median, None if it is to be taken
        self._seen = 0  # steps, with those of the warm-up
        self._stall, self._slowed, self._write = Average(), Average(), Average()
        self._auto = AutoInterval(max_overhead, mtbf)
        self._begun = False
        self._done = 0  # the last step that ended ...
        self._done_at = 0.0  # ... and when
        self._last = 0  # the last step with a save, or the first step of the run ...
        self._since = 0.0  # ... and when it was
        self._promised = -1  # the last step that `next_step` gave
        self._asked = -1  # the last one of them that was as soon as possible
        self._open: dict[int, float | None] = {}  # not written: stall, None before it
        self._requested = self._retry = False
        self._failures = 0  # since a save was written
        self._warned = False  # that the interval is short

    def next_step(
        self, step: int, figures: dict[str, float] | None = None
    ) -> int | None:
        """At which step the next save is to be.

        Args:
          step: the last step that is planned, or done if none is planned ahead: too
            late for a save. A save at step s is of the state after s steps.
          figures: with several processes what `merge` made of theirs. All then ask at
            the same steps with the same figures, and get the same answer.

        Returns:
          One of the `ahead` steps after `step`, or None if no save is to be at any of
          them. An answer stands until that save has been taken.
        """
        self._begin(step)
        if self._promised > step:
            return self._promised
        figures = self.figures() if figures is None else figures
        if self.interval.kind == "auto":
            self._auto.choose(figures)
        due = step + 1 if figures["urgent"] else self._due(step, figures)
        if due is None or due > step + self._ahead:
            return None
        if figures["urgent"]:
            self._asked = due
        self._promised = due
        self._last = max(self._last, due)
        self._open[due] = None
        self._requested = self._retry = False
        return due

    def _due(self, step: int, figures: dict[str, float]) -> int | None:
        """The step of the next save that nobody asked for, None if not known yet."""
        kind, every = self.interval.kind, self.interval.every
        if kind == "steps":
            return int((step // every + 1) * every)
        if kind == "none" or figures["open"]:
            return None
        if kind == "time":
            left, step_s = every - figures["since_s"], figures["step_s"]
            if left > 0 and not step_s:
                return None
            more = math.ceil(left / step_s - 1e-9) if left > 0 else 0
            return max(step + 1, int(figures["done"]) + more)
        if self._auto.steps:
            return max(step + 1, int(figures["last"]) + self._auto.steps)
        if figures["saves"] or figures["steps"] < LEAST_STEPS:
            return None
        wait = _RETRY_STEPS if figures["failures"] else 0
        return max(step + 1, int(figures["last"]) + wait)

    def figures(self) -> dict[str, float]:
        """What has been measured and decided, for metrics and for `merge`.

        Returns:
          Times in seconds, 0 before they are known: `step_s`, `stall_s`, `slowed_s` and
          `write_s`, `since_s` from the last save to the step `done`. `interval` in steps
          and the part `overhead` of the time that is expected. `last`, the step of the
          last save, `steps` and `saves` that were timed, `failures` in a row; `open` is
          1 while a save is to be taken or written, `urgent` if one is asked for.
        """
        if self._step_s is None:
            self._step_s = statistics.median(self._seconds)
        figures = {
            "step_s": self._step_s,
            "stall_s": self._stall.value,
            "slowed_s": self._slowed.value,
            "write_s": self._write.value,
            "since_s": self._done_at - self._since,
            "done": self._done,
            "last": self._last,
            "steps": len(self._seconds),
            "saves": self._write.count,
            "failures": self._failures,
            "open": int(bool(self._open)),
            "urgent": int(self._requested or self._retry),
        }
        k = self._auto.steps if self.interval.kind == "auto" else self.interval.every
        if self.interval.kind == "time":
            k = math.ceil(k / self._step_s) if self._step_s else 0
        spent = k * self._step_s
        return figures | {
            "interval": k,
            "overhead": cost_of(figures) / spent if spent else 0.0,
        }

    def stepped(self, step: int, seconds: float) -> None:
        """Notes that a step has ended.

        Args:
          step: its number, counted from 1.
          seconds: how long it took, without the stall of a save.
        """
        _check_seconds("seconds", seconds)
        self._begin(step - 1)
        self._done, self._done_at = max(self._done, step), self._clock()
        self._seen += 1
        if self._seen > self._warmup:
            self._busy.append(seconds)
            self._busy_steps += 1
            if not self._writing():
                self._settle(0.0)

    def _writing(self) -> list[int]:
        return [step for step, stall in self._open.items() if stall is not None]

    def _settle(self, slowed_s: float) -> None:
        """Takes the steps during a write to the others, without what it cost them."""
        if self._busy:
            share = slowed_s / self._busy_steps
            self._seconds.extend(max(seconds - share, 0.0) for seconds in self._busy)
            self._busy.clear()
            self._busy_steps, self._step_s = 0, None

    def saved(self, step: int, stall_s: float) -> None:
        """Notes that the state after a step is copied, and training goes on.

        Args:
          step: the step, which may be one that `next_step` did not give.
          stall_s: how long training stood still for it.
        """
        _check_seconds("stall_s", stall_s)
        self._begin(step)
        for other in [
            s for s, stall in self._open.items() if s < step and stall is None
        ]:
            del self._open[other]  # passed without a save
        self._open[step] = stall_s
        self._last = max(self._last, step)
        self._since = self._done_at = self._clock()
        self._done = max(self._done, step)

    def written(self, step: int, write_s: float, slowed_s: float | None = None) -> None:
        """Notes that a save is complete.

        Args:
          step: its step.
          write_s: how long it was written in the background.
          slowed_s: how much longer the steps took meanwhile, together; None if that was
            not measured.

        Raises:
          ValueError: if no save of that step is being written.
        """
        _check_seconds("write_s", write_s)
        _check_seconds("slowed_s", abs(slowed_s or 0.0))  # noise may be negative
        stall_s = self._open.get(step)
        if stall_s is None:
            raise ValueError(
                f"`written` must be told of a save that is being written, one of"
                f" {self._writing()}, got step {step}. Call `saved` first"
            )
        del self._open[step]
        self._failures, self._retry = 0, False
        stall, slowed, write = self._stall, self._slowed, self._write
        cost = stall_s + (slowed.value if slowed_s is None else slowed_s)
        jump = jumped(stall.value + slowed.value, stall.last + slowed.last, cost)
        stall.add(stall_s, jump)
        if slowed_s is not None:
            slowed.add(slowed_s, jump)
        write.add(write_s, jumped(write.value, write.last, write_s))
        self._settle(slowed.value if slowed_s is None else slowed_s)
        self._warn_of_short_interval(write_s)

    def _warn_of_short_interval(self, write_s: float) -> None:
        seconds = self.interval.every
        if self.interval.kind == "steps":
            seconds *= self.figures()["step_s"]
        if 0 < seconds < write_s and not self._warned:
            self._warned = True
            _log.warning(
                "a save every %.3g s (%s) is asked for, but writing one took %.3g s: saves"
                " wait for one another",
                *(seconds, self.interval, write_s),
            )

    def failed(self, step: int) -> None:
        """Notes that a save could not be taken or written, in any of the processes."""
        self._begin(step)
        self._open.pop(step, None)
        self._settle(0.0)
        self._failures += 1
        self._since = self._done_at = self._clock()
        if self._failures == 1:
            self._retry = self.interval.kind in ("auto", "time") or step == self._asked
        when = "as soon as possible" if self._retry else "when the next one is due"
        _log.warning(
            "the save of step %d failed, %d in a row; the next try is %s",
            *(step, self._failures, when),
        )

    def request(self, step: int) -> None:
        """Asks for a save as soon as possible, such as on SIGTERM.

        Args:
          step: the last step that is done. A save after it that `next_step` has given
            already is the one asked for.
        """
        self._begin(step)
        self._requested |= self._promised <= step

    def _begin(self, step: int) -> None:
        """Starts counting at the first thing it hears, after `step`."""
        if not self._begun:
            self._begun = True
            self._done = self._last = step
            self._since = self._done_at = self._clock()


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(
            f"`{name}` must be a finite number of seconds, not negative, got {value}."
            " Measure with a clock that never goes back, such as time.monotonic"
        )

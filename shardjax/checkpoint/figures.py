"""What measured times ask of the interval between saves."""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_log = logging.getLogger(__name__)

LEAST_STEPS = 5  # that must have been timed for an interval to be chosen

_SLACK = (
    1.25  # saves become more frequent if what is needed is below by this factor ...
)
_RECENT = 4  # ... after each of so many saves,
_FALL = 2.0  # or at once if below by this factor
_SOON = 5  # times as many steps as it takes to write are enough after the first save
_WEIGHT = 0.3  # of the newest save in the averages, once there are a few
_JUMP = 1.5  # a value this many times the average is no noise
_LEAST = ("steps", "saves")  # figures that only count once all processes have them


@dataclass(frozen=True)
class Needs:
    """How many steps must, and may, lie between two saves; see `needs`.

    Attributes:
      least: the fewest steps that keep to the budget, and to one write at a time; not
        rounded.
      most: the most steps that Young and Daly advise, infinite if unknown.
    """

    least: float
    most: float

    @property
    def steps(self) -> int:
        """The smallest interval."""
        return math.ceil(self.least - 1e-9)


def needs(
    figures: dict[str, float], max_overhead: float, mtbf: float | None = None
) -> Needs:
    """What measured times ask of the interval between saves.

    Args:
      figures: those of a `SavePolicy`, measured.
      max_overhead: the part of the time of the steps that saves may cost.
      mtbf: mean time between failures in seconds.

    Example:
      >>> figures = dict(step_s=0.1, stall_s=0.02, slowed_s=0.05, write_s=0.9)
      >>> needs(figures, max_overhead=0.01).steps
      70
    """
    step, cost = figures["step_s"], cost_of(figures)
    least = max(figures["write_s"] / step + 1, cost / (max_overhead * step))
    advised = math.sqrt(2 * cost * mtbf) / step if mtbf and cost else math.inf
    return Needs(least, advised)


def cost_of(figures: dict[str, float]) -> float:
    """Seconds by which one save makes training longer."""
    return figures["stall_s"] + max(figures["slowed_s"], 0.0)


def merge(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The figures of several processes as one, for all of them to decide by.

    Args:
      figures: of each process, in any order, exchanged with all their 64 bits.

    Returns:
      The greatest of each; of `steps` and `saves`, which say what has been measured,
      the least.

    Raises:
      ValueError: if there are none, or their names differ.

    Example:
      >>> merge([{"write_s": 2.0, "saves": 3}, {"write_s": 5.0, "saves": 2}])
      {'write_s': 5.0, 'saves': 2}
    """
    if not figures:
        raise ValueError(
            "`figures` must be those of one process or more, got none. Give what"
            " `SavePolicy.figures` returned in each process"
        )
    for other in figures:
        if other.keys() != figures[0].keys():
            raise ValueError(
                "`figures` must have the same names in all processes, got"
                f" {sorted(figures[0])} and {sorted(other)}. Run one version of the"
                " program in all of them"
            )
    return {
        name: (min if name in _LEAST else max)(other[name] for other in figures)
        for name in figures[0]
    }


class AutoInterval:
    """The interval that fits the figures, and stays while they hardly change.

    Args:
      max_overhead: the part of the time of the steps that saves may cost.
      mtbf: mean time between failures in seconds, None if unknown.

    Attributes:
      steps: from one save to the next, 0 before that is known.
    """

    def __init__(self, max_overhead: float, mtbf: float | None = None):
        self.steps = 0
        self._max_overhead, self._mtbf = max_overhead, mtbf
        self._saves = 0  # by which the interval was chosen
        self._recent: deque[Needs] = deque(maxlen=_RECENT)  # after the last saves
        self._warned = False  # that failures are too frequent

    def choose(self, figures: dict[str, float]) -> None:
        """Chooses anew if there is another save to learn from."""
        saves = int(figures["saves"])
        if saves <= self._saves or figures["steps"] < LEAST_STEPS:
            return
        if not figures["step_s"]:
            return
        self._saves = saves
        before, self.steps = self.steps, self._follow(figures, saves)
        seconds, cost = self.steps * figures["step_s"], cost_of(figures)
        _log.log(
            logging.INFO if self.steps != before else logging.DEBUG,
            "saving every %d steps (%.3g s, before: %d steps): step %.3g s, stall %.3g s,"
            " write %.3g s, slower steps %.3g s, overhead %.2f %% of at most %.2f %%",
            *(self.steps, seconds, before, figures["step_s"], figures["stall_s"]),
            *(figures["write_s"], figures["slowed_s"]),
            *(100 * cost / seconds, 100 * self._max_overhead),
        )

    def _follow(self, figures: dict[str, float], saves: int) -> int:
        need, steps = needs(figures, self._max_overhead, self._mtbf), self.steps
        if saves == 1:  # it may have compiled, and tells too much then
            soon = _SOON * (figures["write_s"] / figures["step_s"] + 1)
            need = Needs(min(need.least, soon), need.most)
        if saves <= 2 or math.ceil(need.least * _FALL) < steps:
            self._recent.clear()  # the first save may have compiled
        self._recent.append(need)
        most = max(self._recent, key=lambda other: other.least)
        if need.steps > steps:
            steps = need.steps
        elif len(self._recent) in (1, _RECENT) and (
            math.ceil(most.least * _SLACK) < steps
        ):
            steps = most.steps
        if steps > need.most:
            steps = max(need.steps, math.floor(need.most))
        if steps > need.most and not self._warned:
            self._warned = True
            _log.warning(
                "saves cannot be as frequent as failures every %.4g s advise: every %.3g"
                " steps, where overhead and writing allow every %d. The overhead is kept",
                *(self._mtbf, need.most, steps),
            )
        return steps


class Average:
    """A moving average that forgets its first value, which may have compiled.

    Attributes:
      value: the average.
      last: the value taken in last.
      count: how many have been.
    """

    def __init__(self):
        self.value, self.last, self.count = 0.0, 0.0, 0

    def add(self, new: float, at_once: bool) -> None:
        """Takes a new value in; `at_once` forgets all others."""
        self.last, self.count = new, self.count + 1
        weight = 1.0 if at_once or self.count <= 2 else 1 / (self.count - 1)
        self.value += max(weight, _WEIGHT) * (new - self.value)


def jumped(average: float, last: float, new: float) -> bool:
    """Whether a change is no noise: a high value at once, a low one if it is the second.

    Example:
      >>> jumped(1.0, 1.0, 2.0), jumped(1.0, 1.0, 0.5), jumped(1.0, 0.5, 0.5)
      (True, False, True)
    """
    return new > _JUMP * average or _JUMP * max(last, new) < average

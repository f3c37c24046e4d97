"""What measured times ask of the interval between saves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT = 0.3  # of the newest save in the averages, once there are a few
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


class Average:
    """A moving average that forgets its first value, which may have compiled."""

    def __init__(self):
        self.value, self.count = 0.0, 0

    def add(self, new: float, at_once: bool) -> None:
        """Takes a new value in; `at_once` forgets all others."""
        self.count += 1
        weight = 1.0 if at_once or self.count <= 2 else 1 / (self.count - 1)
        self.value += max(weight, _WEIGHT) * (new - self.value)

"""What a replay draws items by."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Draws each item with the same probability."""


@dataclasses.dataclass(frozen=True)
class Proportional:
    """Draws an item with probability ``(priority + eps)**alpha / sum`` (Schaul et al. 2016).

    Attributes:
      alpha: How much priorities count; 0 draws uniformly.
      eps: Added to each priority, so that one of 0 is still drawn. With 0, an item of
        priority 0 is drawn only while all priorities are 0: uniformly then.
      uniform_prob: This part of the draws is uniform. The probability of an item is then
        at least ``uniform_prob / len(replay)``, which bounds importance weights (dqn_zoo).
    """

    alpha: float = 0.6
    eps: float = 1e-6
    uniform_prob: float = 0.0

    def __post_init__(self):
        _check_at_least_0("Proportional", "alpha", self.alpha)
        _check_at_least_0("Proportional", "eps", self.eps)
        if not 0 <= self.uniform_prob <= 1:
            raise ValueError(
                "`uniform_prob` of Proportional must be from 0 to 1, got"
                f" {self.uniform_prob}. It is the part of the draws that is uniform."
            )


@dataclasses.dataclass(frozen=True)
class RankBased:
    """Draws an item by its place among all, the highest priority first (Schaul et al. 2016).

    Rank r is drawn with the probability that ``floor(x)`` is r where x has the density
    ``x**-alpha`` from 1 to N + 1: the paper's ``r**-alpha / sum`` but for the rounding, by
    a formula instead of a table. `probabilities` are those of what is drawn, exactly.

    Ranks are those of the last sort, which takes 0.1 s for a million items. In between, new
    items come first, changed priorities keep their ranks, and the last item takes the place
    of one that leaves.

    Attributes:
      alpha: How much ranks count; 0 draws uniformly.
      refresh: Sort before a draw once so many priorities were set, items added or deleted;
        None: a quarter of the items.
    """

    alpha: float = 0.7
    refresh: int | None = None

    def __post_init__(self):
        _check_at_least_0("RankBased", "alpha", self.alpha)
        if self.refresh is not None and self.refresh < 1:
            raise ValueError(
                f"`refresh` of RankBased must be at least 1, got {self.refresh}. With 1,"
                " ranks are sorted anew after each change."
            )


Sampler = Uniform | Proportional | RankBased


def _check_at_least_0(name: str, field: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(
            f"`{field}` of {name} must be a finite number from 0 on, got {value}."
        )

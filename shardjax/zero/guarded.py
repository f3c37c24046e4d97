"""A jitted step as users call it: with its state checked, and never far ahead."""

from collections.abc import Callable
from typing import Any

from shardjax.pacing import Pace
from shardjax.zero.checks import StateCheck


def guarded_step(run: Callable[..., Any], check: StateCheck) -> Callable[..., Any]:
    """Makes `step(state, batch) -> (state, info)` of a jitted function.

    Each call looks at its state, and waits until all steps but the last two are done: a
    loop that reads nothing would stop for good on many simulated devices (`Pace`).

    Args:
      run: jitted; `info` has `loss`, which is not donated.
      check: of its states.

    Returns:
      The step. `step.jitted` is `run`, for `lower`.
    """
    pace = Pace()

    def step(state, batch):
        state = check(state)
        pace.wait()
        state, info = run(state, batch)
        check.returned(state)
        pace.add(info["loss"])
        return state, info

    step.jitted = run
    return step

"""What a checkpoint has of a run of `experiments.dqn`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What a checkpoint has of a run; numbers that are no arrays are in its `extra`."""

    learner: Any
    kept: Any  # of the learner
    replay: dict[str, Any]  # of `padded`
    tables: Any  # of the learner
    acting: dict[str, Any]  # where the environments are, if that can be saved

    def replace(self, **changes) -> "Kept":
        """A copy with other values for some fields."""
        return dataclasses.replace(self, **changes)


def padded(state: dict[str, Any], capacity: int) -> dict[str, Any]:
    """A replay's state with arrays of one size, whatever is in it: they are restored into
    those of another."""
    rows = len(state["ids"])

    def pad(x):
        out = np.zeros((capacity, *x.shape[1:]), x.dtype)
        out[: len(x)] = x
        return out

    grow = [name for name in ("items", "ids", "order", "priorities") if name in state]
    sizes = {"rows": np.int64(rows), "size": np.int64(len(state["order"]))}
    return {**state, **{n: jax.tree.map(pad, state[n]) for n in grow}, **sizes}


def unpadded(state: dict[str, Any]) -> dict[str, Any]:
    """What `padded` was given."""
    state = dict(state)
    rows, size = int(state.pop("rows")), int(state.pop("size"))
    state["order"] = state["order"][:size]
    for name in ("items", "ids", "priorities"):
        if name in state:
            state[name] = jax.tree.map(lambda x: x[:rows], state[name])
    return state

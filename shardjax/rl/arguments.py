"""Ids and priorities as a replay takes them."""

from typing import Any

import numpy as np


def as_priorities(ids: np.ndarray, priorities: Any, method: str) -> np.ndarray:
    """Priorities as float64 [n], copied; whether they are some is not looked at."""
    values = np.array(priorities, np.float64)
    if values.shape != ids.shape:
        raise ValueError(
            f"`priorities` of `{method}` must be one for each item, {list(ids.shape)}, got"
            f" {list(values.shape)}."
        )
    return values


def wrong_priority(ids, priorities, i: int, method: str) -> ValueError:
    """The error that number `i` of priorities is none."""
    return ValueError(
        f"`priorities` of `{method}` must be finite, from 0 on and below 1e290 to the power"
        f" of alpha, got {priorities[i]} for id {ids[i]} (number {i} of {len(ids)}). No"
        " priority was set: look at what made it, such as the loss."
    )


def as_ids(ids: Any) -> np.ndarray:
    """Ids as uint64 [...]."""
    array = np.asarray(ids)
    if array.dtype == np.uint64:
        return array
    if array.size and not (array.dtype.kind in "iu" and array.min() >= 0):
        raise TypeError(
            "`ids` must be those that `add` and `sample` gave, uint64, got"
            f" {array.dtype}."
        )
    return array.astype(np.uint64)

"""Processes that wait for each other, and that must have the same facts."""

import json
from collections.abc import Mapping
from typing import Any

from shardjax.processes.channel import Channel
from shardjax.processes.names import processes

_barriers: dict[str, Channel] = {}


def barrier(name: str, *, timeout: float = 300.0) -> None:
    """Waits until all processes have called this with the same name as often.

    Args:
      name: of the barrier; it may be used again.
      timeout: seconds to wait.

    Raises:
      TimeoutError: if processes did not come in time; it names them. The barrier is of no
        use afterwards.

    Example:
      >>> barrier("example")  # one process: it waits for nobody
    """
    _shared(f"barrier {name}", timeout).exchange(b"")


def _shared(name: str, timeout: float) -> Channel:
    """The channel of this module with a name, made when it is first used."""
    if name not in _barriers:
        _barriers[name] = Channel(name, timeout=timeout)
    _barriers[name].timeout = timeout
    return _barriers[name]


def check_agreement(what: Mapping[str, Any], *, timeout: float = 300.0) -> None:
    """Checks that all processes have the same facts, such as their configuration.

    Args:
      what: facts as JSON has them; anything else counts as what `str` makes of it.
      timeout: seconds to wait for the others.

    Raises:
      ValueError: in all processes, if they differ. It names the entries by their path,
        such as `config.seed`, and the values with the processes that have them.
      TimeoutError: if processes did not come in time; it names them.

    Example:
      >>> check_agreement({"config": {"seed": 1}})  # one process agrees with itself
    """
    mine = json.dumps(what, default=str).encode()
    every = _shared("agreement", timeout).exchange(mine)
    if len(set(every)) == 1:
        return
    flat = [dict(_entries(json.loads(text))) for text in every]
    names = list(dict.fromkeys(name for facts in flat for name in facts))
    lines = [_difference(name, [facts.get(name) for facts in flat]) for name in names]
    lines = [line for line in lines if line]
    if lines:
        raise ValueError(
            "the processes of this run must agree, but "
            + "; ".join(lines)
            + ". Start all of them with the same options and versions"
        )


def _entries(value: Any, path: str = ""):
    """The entries of nested mappings by dotted path, as JSON."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _entries(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, sort_keys=True)


def _difference(name: str, values: list[str | None]) -> str:
    """What processes have for an entry, if that differs; "" if it does not."""
    by_value: dict[str | None, list[int]] = {}
    for process, value in enumerate(values):
        by_value.setdefault(value, []).append(process)
    if len(by_value) == 1:
        return ""
    parts = [
        f"{'missing' if value is None else value} in {processes(numbers)}"
        for value, numbers in by_value.items()
    ]
    return f"`{name}` is {' and '.join(parts)}"

"""Calls that several processes make at the same place of their programs."""

import json
from collections.abc import Callable
from typing import Any

Agree = Callable[[bytes], list[bytes]]
"""Gives all processes a value, and returns theirs, by process; such as
`Channel.exchange`."""


def agree_on(agree: Agree, value: Any) -> list[Any]:
    """What each process gives, as JSON has it.

    Args:
      agree: with the other processes.
      value: of this process, for JSON.
    """
    return [json.loads(x) for x in agree(json.dumps(value).encode())]


def error_text(error: Exception) -> str:
    """An error as other processes tell of it."""
    return f"{type(error).__name__}: {error}"


class PeerError(RuntimeError):
    """What was called in all processes has failed in another one."""


def together(agree: Agree, call: Callable[[], Any]) -> list[Any]:
    """Calls something in all processes; if it fails in one, it fails in all.

    Args:
      agree: with the other processes.
      call: gives something that JSON can hold.

    Returns:
      What it gives in each process.

    Raises:
      Exception: of this process's call.
      PeerError: if the call failed in another process.
    """
    value, error = None, None
    try:
        value = call()
    except Exception as problem:  # whatever it is, the others must not wait
        error = problem
    own = {"value": value, "error": None if error is None else error_text(error)}
    found = agree_on(agree, own)
    if error is not None:
        raise error
    for process, other in enumerate(found):
        if other["error"] is not None:
            raise PeerError(f"process {process} failed: {other['error']}")
    return [other["value"] for other in found]

"""Checkpoints that several processes write together."""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardjax.processes import Channel, process_count, process_index, service
from shardjax.processes.channel import PREFIX
from shardjax.together import together

T = TypeVar("T")

_NUMBERS = itertools.count()
_SEEN_WITHIN = 10.0  # seconds that storage may take to show a file to other machines
_LOOK_EVERY = 8  # steps between two looks at whether a process has been asked to end


class Peers:
    """The processes that write a checkpoint; this one may be the only one.

    Make it in all processes, in the same order.

    Attributes:
      count: how many they are.
      is_first: whether this is the first one, which makes and commits steps.
      folder: below a step's tables, where this process's rows go.
    """

    def __init__(self):
        self.count, index = process_count(), process_index()
        self.is_first = index == 0
        self.folder = f"process{index}" if self.count > 1 else ""
        number = next(_NUMBERS)
        # one for the main thread, one for the thread that writes
        self._failures = f"{PREFIX}/checkpoint{number}/failed"
        self._writes = 0
        self._channels = [
            Channel(f"checkpoint{number}-{name}", timeout=600.0)
            for name in ("main", "writing")
            if self.count > 1
        ]

    def together(self, call: Callable[[], Any], writing: bool = False) -> list[Any]:
        """Calls something in all processes, and returns what it gives in each, as JSON has
        it; it fails in all if in one.

        Args:
          call: to be called.
          writing: whether the thread that writes asks.
        """
        if self.count == 1:
            return [call()]
        return together(self._channels[writing].exchange, call)

    def write(self, call: Callable[[], Any]) -> list[Any]:
        """As `together`, of the thread that writes; but all learn of a failure at once,
        also those whose call waits for the others and asks `any_failed` meanwhile."""
        if self.count == 1:
            return [call()]
        self._writes += 1

        def told() -> Any:
            try:
                return call()
            except BaseException:
                service.put(f"{self._failures}/{self._writes}/{process_index()}", b"1")
                raise

        return self.together(told, writing=True)

    def any_failed(self) -> bool:
        """Whether what is being written has failed in a process."""
        if self.count == 1:
            return False
        return bool(service.get_all(f"{self._failures}/{self._writes}/"))

    def first_opens(self, path: Path, open_folder: Callable[[bool], T]) -> T:
        """Opens a folder first in the first process, then in the others.

        Args:
          path: of the folder.
          open_folder: called with whether this is the first process.

        Raises:
          FileNotFoundError: if it is not the same folder in all processes.
        """
        opened: list[T] = []

        def open_one(now: bool) -> None:
            if now:
                opened.append(open_folder(self.is_first))

        self.together(lambda: open_one(self.is_first))
        if self.count > 1:
            self._check_shared(path)
        self.together(lambda: open_one(not self.is_first))
        return opened[0]

    def _check_shared(self, path: Path) -> None:
        """Raises unless a file that the first process makes in a folder is there for all."""

        def mark() -> str:
            name = f".shared_{secrets.token_hex(8)}"
            if self.is_first:
                (path / name).touch()
            return name

        file = path / self.together(mark)[0]

        def look() -> None:
            end = time.monotonic() + _SEEN_WITHIN
            while not file.exists():
                if time.monotonic() > end:
                    raise FileNotFoundError(
                        "checkpoints need a folder that all processes share, and what"
                        f" process 0 writes to {str(path)!r} is not there for process"
                        f" {process_index()}. Give the same folder to all, on storage that"
                        " all machines see"
                    )
                time.sleep(0.05)

        try:
            self.together(look)
        finally:
            if self.is_first:
                file.unlink()

    def any(self, step: int, flag: bool) -> bool:
        """Whether a flag is set in any process; of several, they look every 8 steps."""
        if self.count == 1:
            return flag
        if step % _LOOK_EVERY:
            return False
        return any(self.together(lambda: flag))

    def close(self) -> None:
        """Nobody asks any more."""
        for channel in self._channels:
            channel.close()


def joined(
    details: dict[str, Any], base: int | None, parts: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[int, int]]:
    """Puts what each process has written into the details of a step.

    Args:
      details: of the first process, in and out.
      base: the step that its rows are the changes since.
      parts: of each process.

    Returns:
      By path: size and CRC-32 of the files that are known.
    """
    known: dict[str, tuple[int, int]] = {}
    for part in parts:
        known |= part["known"]
    if details["tables"] is None:
        return known
    for number, group in enumerate(details["tables"]["groups"]):
        group["rows"] = sum(part["rows"][number] for part in parts)
    names = ("written", "removed")
    if len(parts) == 1:
        details["counts"] = parts[0]["counts"]
        details["rows"] = {"base": base} | {name: parts[0][name] for name in names}
        return known
    names = ("folder", "counts", *names)
    details["counts"] = None
    details["rows"] = {
        "base": base,
        "parts": [{name: part[name] for name in names} for part in parts],
    }
    return known

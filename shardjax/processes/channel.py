"""Rounds in which each process gives a value and gets those of all."""

import threading
import time

from shardjax.processes import service
from shardjax.processes.names import processes

PREFIX = "shardjax"


class ChannelClosed(RuntimeError):
    """A `Channel` that was closed, or that an exchange on it failed before."""


class Channel:
    """Tells all processes what each of them has to say, round by round.

    All processes make the channel, with the same name, and call `exchange` equally often.
    It goes through the coordination service of process 0, without devices: it may be
    called by any thread, but one at a time. A round of small values takes some
    milliseconds.

    Args:
      name: of the channel, one that this process has not used before.
      timeout: seconds that an exchange waits for the others.

    Raises:
      ValueError: if this process has used the name before.

    Example:
      >>> channel = Channel("example")
      >>> channel.exchange(b"from process 0")  # one process: itself
      [b'from process 0']
      >>> channel.close()
    """

    _names: set[str] = set()

    def __init__(self, name: str, *, timeout: float = 300.0):
        if not name or name in self._names:
            raise ValueError(
                f"a channel must have a name that this process has not used before, got"
                f" {name!r}. Keep the channel, or number the names"
            )
        self._names.add(name)
        self.name, self.timeout = name, timeout
        self._round = 0
        self._closed = threading.Event()
        self._busy = threading.Lock()

    def exchange(self, value: bytes) -> list[bytes]:
        """Gives a value to all processes, and waits for theirs.

        Args:
          value: of this process; some MB at most, as process 0 holds those of all.

        Returns:
          The values of all processes, in their order.

        Raises:
          TimeoutError: if processes did not come to this round in time; it names them.
            The channel is of no use afterwards.
          ChannelClosed: if the channel is closed, now or while this waits.
          RuntimeError: if two threads use it at once, or the service is gone.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"channel {self.name!r} is in use by another thread. Give each thread its"
                " own channel"
            )
        try:
            self._check_open()
            return self._exchange(value) if service.process_count() > 1 else [value]
        except Exception:
            self._closed.set()
            raise
        finally:
            self._round += 1
            self._busy.release()

    def close(self) -> None:
        """Ends the channel for this process; an `exchange` that waits raises soon."""
        self._closed.set()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ChannelClosed(
                f"channel {self.name!r} is closed, in round {self._round}"
            )

    def _key(self, process: int, back: int = 0) -> str:
        return f"{PREFIX}/channel/{self.name}/{self._round - back}/{process}"

    def _exchange(self, value: bytes) -> list[bytes]:
        me, count = service.process_index(), service.process_count()
        end = time.monotonic() + self.timeout
        # A byte of our own: the service takes an empty value for none.
        service.put(self._key(me), b"=" + value)
        found = []
        for process in range(count):
            if process == me:
                found.append(value)
                continue
            while (theirs := service.wait_for(self._key(process), end)) is None:
                self._check_open()
                if time.monotonic() > end:
                    self._late(range(process, count))
            found.append(theirs[1:])
        if self._round:  # who is in this round has all of the round before
            service.delete(self._key(me, back=1))
        return found

    def _late(self, numbers: range) -> None:
        """Raises the error that names those of the processes that did not come."""
        now = time.monotonic()
        away = [
            p
            for p in numbers
            if p != service.process_index()
            and service.wait_for(self._key(p), now) is None
        ]
        if away:
            raise TimeoutError(
                f"{processes(away)} did not come to round {self._round} of channel"
                f" {self.name!r} within {self.timeout:g} seconds. Look at what they wrote"
                " last: they may be dead, or wait for something else"
            )

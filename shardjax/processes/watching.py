"""Ends a process, with a reason, when the run cannot go on: another process is gone.

JAX ends the processes of a run by SIGABRT some time after one of them stopped giving signs
of life, or at once where process 0 is gone, whose service all need. That is the net; what
is said and seen before is here.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from shardjax.processes import service
from shardjax.processes.channel import PREFIX, Channel
from shardjax.processes.names import processes

LOST = 76
"""The exit code of a process that ends because another one is gone."""

heartbeat = 20.0  # that the processes were joined with
_KEYS = f"{PREFIX}/watch/"
_FAILED = f"{_KEYS}failed"


@contextlib.contextmanager
def watch(*, timeout: float = 3600.0) -> Iterator[None]:
    """A context for all that a program does once its processes are joined.

    If a process is killed, hangs as a whole or fails in it, all others end, whatever they
    are doing, with exit code `LOST` (76) and a message on stderr that names it. Which is
    seen two seconds after an error that Python has seen, and `heartbeat` seconds after a
    process stopped without one. A process that fails prints its error and ends with 1 at
    once: what is outside of the context does not run.

    At its end the processes wait for each other, and leave the service of JAX. So it is
    the outermost context, and comes once. In a run of one process it does nothing.

    Args:
      timeout: seconds that a process which is at the end waits for the others.

    Example:
      >>> with watch():  # one process: nothing to watch
      ...   pass
    """
    if service.process_count() == 1:
        yield
        return
    watcher = _Watcher()
    watcher.start()
    try:
        yield
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            watcher.fail(end)
        try:  # such as a run that was told to end: all of them do
            watcher.finish(60.0 if end.code else timeout)
        except Exception as error:
            watcher.fail(error)
        raise
    except BaseException as error:
        watcher.fail(error)
    try:
        watcher.finish(timeout)
    except Exception as error:
        watcher.fail(error)


class _Watcher:
    """Tells the other processes that this one is alive, and looks whether they are."""

    def __init__(self):
        self._me, self._count = service.process_index(), service.process_count()
        self._heartbeat = heartbeat
        self._end = Channel("watch/end")
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._look, name="watch processes", daemon=True
        )
        self._seen: dict[str, tuple[bytes, float]] = {}  # beats, and when they came
        self._answered = time.monotonic()
        self._before: Any = None  # what SIGABRT did
        self._libc = ctypes.CDLL(None)
        self._libc.signal.restype = ctypes.c_void_p
        self._libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        # Python's own handlers run too late: the process ends when the signal's returns.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)

    def start(self) -> None:
        self._before = self._libc.signal(
            signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p)
        )
        self._thread.start()

    def finish(self, timeout: float) -> None:
        """Waits for all to be here, and leaves the service."""
        self._end.timeout = timeout
        self._end.exchange(b"")
        self._stop.set()
        self._thread.join()
        service.shut_down()
        self._libc.signal(signal.SIGABRT, self._before)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this process for an error, once the others know of it."""
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        _flush()
        if "Gloo" in str(error) or isinstance(error, jax.errors.JaxRuntimeError):
            # likely because of another process: the reason will be known soon
            self._stop.wait(2 * self._heartbeat)
        kind = "" if isinstance(error, SystemExit) else type(error).__name__
        why = ": ".join(x for x in (kind, str(error)) if x)[:2000]
        told = json.dumps({"process": self._me, "why": why}).encode()
        with contextlib.suppress(Exception):
            service.put(_FAILED, told)
        with contextlib.suppress(Exception):
            self._linger(5.0)
        os._exit(1)

    def _linger(self, seconds: float) -> None:
        """Process 0 stays until the others have heard why: they need its service."""
        end = time.monotonic() + seconds
        while self._me == 0 and time.monotonic() < end:
            heard = [key for key in service.get_all(_KEYS) if "/heard/" in key]
            if len(heard) == self._count - 1:
                return
            time.sleep(0.1)

    def _look(self) -> None:
        """What the thread does."""
        beat, period = 0, min(max(self._heartbeat / 10, 0.2), 2.0)
        while not self._stop.wait(period):
            beat += 1
            try:
                mine = f"{_KEYS}beat/{self._me}"
                service.put(mine, str(beat).encode(), replace=True)
                found = service.get_all(_KEYS)
            except Exception:
                self._check_beats()
                continue
            self._answered = time.monotonic()
            for key, value in found.items():
                if self._seen.get(key, (b"", 0.0))[0] != value:
                    self._seen[key] = value, self._answered
            if _FAILED in found and not self._stop.is_set():
                self._hear(json.loads(found[_FAILED]))
            self._check_beats()

    def _hear(self, failed: dict[str, Any]) -> None:
        """Another process, if it was not this one, has failed."""
        if failed["process"] == self._me:
            return
        with contextlib.suppress(Exception):
            service.put(f"{_KEYS}heard/{self._me}", b"1", replace=True)
            self._linger(5.0)
        self._lose(f"process {failed['process']} has failed: {failed['why']}")

    def _check_beats(self) -> None:
        """Ends this process if another is there for JAX, but does nothing any more."""
        limit = 2 * self._heartbeat
        if quiet := self._quiet(limit):
            self._lose(_no_sign(quiet, limit))

    def _quiet(self, limit: float) -> list[int]:
        """The processes of which nothing has been heard for a time."""
        now = time.monotonic()
        if now - self._answered > limit:
            return [0] if self._me else []
        beats = f"{_KEYS}beat/"
        return [
            int(key.removeprefix(beats))
            for key, (_, at) in self._seen.items()
            if key.startswith(beats) and now - at > limit
        ]

    def _aborted(self, _: int) -> None:
        """What SIGABRT does."""
        if self._me and not _is_listening():
            self._lose("process 0, whose service all need, is gone")
        if quiet := self._quiet(self._heartbeat / 2):
            self._lose(_no_sign(quiet, self._heartbeat / 2))
        self._lose("it was aborted, for the reason above", 128 + signal.SIGABRT)

    def _lose(self, why: str, code: int = LOST) -> NoReturn:
        """Ends this process."""
        _flush()
        text = (
            f"shardjax: process {self._me} of {self._count} ends, as the run cannot go on:"
            f" {why}. Start the same command in all processes again: a run that saves"
            " checkpoints resumes from its newest one.\n"
        )
        os.write(2, text.encode())
        os._exit(code)


def _no_sign(quiet: list[int], seconds: float) -> str:
    verb = "has" if len(quiet) == 1 else "have"
    return (
        f"{processes(quiet)} {verb} given no sign of life for more than {seconds:g}"
        " seconds: killed, stopped, or its machine cannot be reached"
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _is_listening() -> bool:
    """Whether something listens at the port of the coordinator."""
    address = service.coordinator()
    try:
        if address is not None:
            socket.create_connection(address, timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True

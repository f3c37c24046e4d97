"""The processes of a run meet before JAX joins them, so that those away can be named."""

import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from shardjax.processes.names import processes
from shardjax.processes.service import SLICE

_RUN = "shardjax"


def parse_address(coordinator: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"."""
    host, colon, port = coordinator.rpartition(":")
    decimal = port.isascii() and port.isdecimal()
    if not (colon and host and decimal and 0 < int(port) < 65536):
        raise ValueError(
            "`coordinator` must be HOST:PORT, the address of process 0 and a free port"
            f" there, got {coordinator!r}. Write for example localhost:1234"
        )
    return host, int(port)


@dataclass(frozen=True)
class Meeting:
    """The processes of a run before JAX joins them.

    JAX 0.10 does not raise when a process does not come: it ends the process with SIGABRT.
    So they meet at the port of the coordinator first: each tells process 0 its number, and
    process 0 tells them to go on once all are there, or what is wrong.
    """

    host: str
    port: int
    count: int
    index: int
    timeout: float

    def __post_init__(self):
        for name, value in (("num_processes", self.count), ("process_id", self.index)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"`{name}` must be an integer, got {value!r}")
        if self.count < 1:
            raise ValueError(f"`num_processes` must be at least 1, got {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"`process_id` must be in [0, {self.count}), as `num_processes` is"
                f" {self.count}; got {self.index}"
            )

    def meet(self) -> None:
        """Returns once all processes are there."""
        end = time.monotonic() + self.timeout
        if self.index == 0:
            self._gather(end)
        else:
            self._report(end)

    def _gather(self, end: float) -> None:
        """Process 0: waits for the others, and answers them all."""
        came: dict[int, socket.socket] = {}
        trouble: Exception | None = None
        with self._listen(end) as listener:
            while len(came) + 1 < self.count and trouble is None:
                listener.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    away = sorted({*range(1, self.count)} - {*came})
                    trouble = TimeoutError(
                        f"{processes(away)} of {self.count} did not come to"
                        f" the coordinator {self.host}:{self.port} within"
                        f" {self.timeout:g} seconds. Start all of them, with the same"
                        " coordinator; each must be able to reach it"
                    )
                    break
                trouble = self._admit(peer, came)
        answer = {"go": trouble is None, "why": str(trouble)}
        answer["late"] = isinstance(trouble, TimeoutError)
        for peer in came.values():
            with peer:
                _send(peer, answer)
        if trouble is not None:
            raise trouble

    def _listen(self, end: float) -> socket.socket:
        """The port of the coordinator, once what had it before is gone."""
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        host = bind.rpartition(":")[0].strip("[]") if bind else ""
        six = socket.has_dualstack_ipv6() and (not host or ":" in host)
        family = socket.AF_INET6 if six else socket.AF_INET
        while True:
            try:
                return socket.create_server(
                    (host, self.port),
                    family=family,
                    dualstack_ipv6=six and not host,
                    backlog=self.count,
                )
            except OSError as error:
                if time.monotonic() > end:
                    raise OSError(
                        f"process 0 cannot listen on the port of the coordinator"
                        f" {self.host}:{self.port}, tried for {self.timeout:g} seconds:"
                        f" {error}. Give a port that nothing else uses"
                    ) from error
            time.sleep(SLICE)

    def _admit(self, peer: socket.socket, came: dict[int, socket.socket]):
        """Takes note of a process that came; what is wrong with it, or None."""
        said = _receive(peer, 5.0)
        if said is None or said.get("run") != _RUN:
            peer.close()  # not one of ours
            return None
        index, count = said["process"], said["of"]
        if count == self.count and index not in came and 0 < index < self.count:
            came[index] = peer
            return None
        if count != self.count:
            why = f"process {index} has `num_processes` {count}, process 0 {self.count}"
        else:
            why = f"`process_id` {index} was given to two processes"
        with peer:
            _send(peer, {"go": False, "why": why, "late": False})
        return ValueError(f"{why}. Each must have its own number, and the same count")

    def _report(self, end: float) -> None:
        """Another process: tells process 0 that it is there, and waits for the others."""
        at, error = f"the coordinator {self.host}:{self.port}", None
        while time.monotonic() < end:
            try:
                peer = socket.create_connection((self.host, self.port), timeout=5.0)
            except OSError as e:
                error = e
                time.sleep(SLICE)
                continue
            with peer:
                hello = {"run": _RUN, "process": self.index, "of": self.count}
                _send(peer, hello)
                said = _receive(peer, max(end - time.monotonic(), 0.0) + 5.0)
            if (
                said is None
            ):  # another program's port, or a process 0 that is on its way out
                error = ConnectionError("it does not answer as process 0 of a run does")
                time.sleep(SLICE)
            elif not said["go"]:
                raise (TimeoutError if said["late"] else ValueError)(said["why"])
            else:
                self._await_service(end)
                return
        raise TimeoutError(
            f"process {self.index} of {self.count} found no process 0 at {at} within"
            f" {self.timeout:g} seconds: {error}. Start process 0, with this address of"
            " its host and a port that the others can reach"
        )

    def _await_service(self, end: float) -> None:
        """Waits until JAX listens where process 0 did; its client retries seldom."""
        while time.monotonic() < end:
            try:
                socket.create_connection((self.host, self.port), timeout=5.0).close()
                return
            except OSError:
                time.sleep(0.02)


def _send(peer: socket.socket, value: dict[str, Any]) -> None:
    """Sends a line of JSON; a peer that is gone is no matter."""
    try:
        peer.settimeout(5.0)
        peer.sendall(json.dumps(value).encode() + b"\n")
    except OSError:
        pass


def _receive(peer: socket.socket, timeout: float) -> dict[str, Any] | None:
    """The line of JSON that a peer sends; None if that is not what it does."""
    end, line = time.monotonic() + timeout, b""
    try:
        while not line.endswith(b"\n") and len(line) < 2**16:
            peer.settimeout(max(end - time.monotonic(), 0.001))
            part = peer.recv(2**12)
            if not part:
                return None
            line += part
        value = json.loads(line)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None

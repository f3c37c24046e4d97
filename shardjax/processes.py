"""Many processes of one run: how they find each other, and how they tell each other things.

`start_processes` joins them by JAX's own coordination service; from then on
`jax.devices()` has the devices of all. What the host sides of the processes tell each
other goes through that service too, not over the devices: a `Channel` may be used by any
thread at any time, also while the devices are at work. Everything here works in a run of
one process, which waits for nobody.

What is private in JAX and used by this library about processes is used in this file alone.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

_SLICE = 0.2  # seconds that a wait in the service lasts before it looks up again
_PREFIX = "shardjax"


def process_index() -> int:
    """The number of this process among those of the run; unlike `jax.process_index` it
    starts no backend.

    Returns:
      From 0 on.

    Example:
      >>> process_index()
      0
    """
    return distributed.global_state.process_id


def process_count() -> int:
    """The number of processes of the run; unlike `jax.process_count` it starts no backend.

    Returns:
      At least 1.

    Example:
      >>> process_count()
      1
    """
    return distributed.global_state.num_processes


def start_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 60.0,
    heartbeat: float = 20.0,
) -> None:
    """Joins the processes of a run; each of them calls it, before its first JAX operation.

    With all three arguments, those are taken. With none of them JAX looks for what started
    the process: SLURM (srun), Open MPI (mpirun), a TPU pod on Google Cloud or a
    Kubernetes job; where there is none of them, or it started one process only, nothing
    happens.

    Args:
      coordinator: "HOST:PORT" of process 0, a free port there that the others can reach.
      num_processes: how many processes the run has.
      process_id: the number of this one, from 0 on.
      timeout: seconds within which all processes must have come.
      heartbeat: seconds without a sign of life after which a process counts as dead, at
        least 1; JAX then ends the others.

    Raises:
      ValueError: for some of the three without the others, or values that cannot be; or
        if two processes gave the same number, or another `num_processes`.
      RuntimeError: if JAX already runs, or the processes are joined already.
      TimeoutError: if process 0 is not there, or others are not; it names them.
      OSError: if process 0 cannot use the port.

    Example:
      >>> start_processes("localhost:1234", 1, 0)  # one process: nothing to join
      >>> process_count()
      1
    """
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(
            "`coordinator`, `num_processes` and `process_id` belong together:"
            f" {' and '.join(f'`{name}`' for name in missing)}"
            f" {'is' if len(missing) == 1 else 'are'} missing. Give all three, or none of"
            " them where SLURM, Open MPI, Kubernetes or a TPU pod starts the processes"
        )
    if heartbeat < 1 or timeout < 1:
        raise ValueError(
            "`timeout` and `heartbeat` must be at least 1 second, got"
            f" {timeout:g} and {heartbeat:g}"
        )
    local = None
    if missing:
        find = clusters.ClusterEnv.auto_detect_unset_distributed_params
        coordinator, num_processes, process_id, local = find(
            None, None, None, None, None, int(timeout)
        )
    if coordinator is None or num_processes is None or process_id is None:
        return
    run = _Run(*_address(coordinator), num_processes, process_id, timeout)
    if run.count == 1:
        return
    if distributed.global_state.client is not None:
        raise RuntimeError(
            f"the {process_count()} processes of this run are joined already, this one as"
            f" {process_index()}. Call start_processes once"
        )
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "start_processes must come before the first JAX operation (jax.devices and"
            " jnp.zeros are such), but JAX already runs in this process, with the devices"
            " of this process alone. Call it right after the imports"
        )
    run.meet()
    jax.distributed.initialize(
        f"{run.host}:{run.port}",
        run.count,
        run.index,
        local_device_ids=local,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeout), 10),
        heartbeat_timeout_seconds=max(int(heartbeat), 1),
        shutdown_timeout_seconds=max(int(heartbeat), 1),
    )


def _address(coordinator: str) -> tuple[str, int]:
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
class _Run:
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
                        f"{_processes(away)} of {self.count} did not come to"
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
            time.sleep(_SLICE)

    def _admit(self, peer: socket.socket, came: dict[int, socket.socket]):
        """Takes note of a process that came; what is wrong with it, or None."""
        said = _receive(peer, 5.0)
        if said is None or said.get("run") != _PREFIX:
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
                time.sleep(_SLICE)
                continue
            with peer:
                hello = {"run": _PREFIX, "process": self.index, "of": self.count}
                _send(peer, hello)
                said = _receive(peer, max(end - time.monotonic(), 0.0) + 5.0)
            if (
                said is None
            ):  # another program's port, or a process 0 that is on its way out
                error = ConnectionError("it does not answer as process 0 of a run does")
                time.sleep(_SLICE)
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


class ChannelClosed(RuntimeError):
    """A `Channel` that was closed, or that an exchange on it failed before."""


class Channel:
    """Tells all processes what each of them has to say, round by round.

    All processes make the channel, with the same name, and call `exchange` equally often.
    It goes through the coordination service of process 0, without devices: it may be
    called by any thread, but one at a time. A round of small values takes about a
    millisecond for a few processes.

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
            return self._exchange(value) if process_count() > 1 else [value]
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
        return f"{_PREFIX}/channel/{self.name}/{self._round - back}/{process}"

    def _exchange(self, value: bytes) -> list[bytes]:
        me, count, client = process_index(), process_count(), _client()
        end = time.monotonic() + self.timeout
        # A byte of our own: the service takes an empty value for none.
        client.key_value_set_bytes(self._key(me), b"=" + value)
        found = []
        for process in range(count):
            if process == me:
                found.append(value)
                continue
            while (theirs := _wait_for(self._key(process), end)) is None:
                self._check_open()
                if time.monotonic() > end:
                    self._late(range(process, count))
            found.append(theirs[1:])
        if self._round:  # who is in this round has all of the round before
            client.key_value_delete(self._key(me, back=1))
        return found

    def _late(self, processes) -> None:
        """Raises the error that names those of the processes that did not come."""
        now = time.monotonic()
        away = [
            p
            for p in processes
            if p != process_index() and _wait_for(self._key(p), now) is None
        ]
        if away:
            raise TimeoutError(
                f"{_processes(away)} did not come to round {self._round} of channel"
                f" {self.name!r} within {self.timeout:g} seconds. Look at what they wrote"
                " last: they may be dead, or wait for something else"
            )


def _client() -> Any:
    """The client of the coordination service."""
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "the processes of this run are not joined any more. Close channels before"
        )
    return client


def _wait_for(key: str, end: float) -> bytes | None:
    """The value of a key, once there is one; None if there is not within a short time."""
    wait = min(max(end - time.monotonic(), 0.001), _SLICE)
    try:
        return _client().blocking_key_value_get_bytes(key, max(int(1e3 * wait), 1))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def _processes(numbers) -> str:
    """Names processes, such as "process 1" and "processes 1, 2"."""
    numbers = list(numbers)
    names = ", ".join(map(str, numbers))
    return f"process {names}" if len(numbers) == 1 else f"processes {names}"


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
        f"{'missing' if value is None else value} in {_processes(processes)}"
        for value, processes in by_value.items()
    ]
    return f"`{name}` is {' and '.join(parts)}"

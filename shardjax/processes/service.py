"""JAX's coordination service: all that this library uses of it that is private in JAX."""

import time
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

SLICE = 0.2  # seconds that a wait in the service lasts before it looks up again


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


def is_joined() -> bool:
    """Whether this process is joined with others."""
    return distributed.global_state.client is not None


def jax_runs() -> bool:
    """Whether there has been a JAX operation that needed devices."""
    return xla_bridge.backends_are_initialized()


def find_cluster(
    timeout: float,
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """What started the process says: coordinator, number of processes, number of this one
    and its devices; None each if nothing is found that starts processes."""
    find = clusters.ClusterEnv.auto_detect_unset_distributed_params
    return find(None, None, None, None, None, int(timeout))


def coordinator() -> tuple[str, int] | None:
    """Host and port of process 0, once the processes are joined."""
    address = distributed.global_state.coordinator_address
    host, _, port = (address or "").rpartition(":")
    return (host, int(port)) if host else None


def put(key: str, value: bytes, *, replace: bool = False) -> None:
    """Gives a key of the service a value."""
    _client().key_value_set_bytes(key, value, allow_overwrite=replace)


def delete(key: str) -> None:
    """Removes a key of the service."""
    _client().key_value_delete(key)


def get_all(prefix: str) -> dict[str, bytes]:
    """The keys below a prefix, with their values."""
    return dict(_client().key_value_dir_get_bytes(prefix))


def _client() -> Any:
    """The client of the coordination service."""
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "the processes of this run are not joined any more. Close channels before"
        )
    return client


def wait_for(key: str, end: float) -> bytes | None:
    """The value of a key, once there is one; None if there is not within a short time."""
    wait = min(max(end - time.monotonic(), 0.001), SLICE)
    try:
        return _client().blocking_key_value_get_bytes(key, max(int(1e3 * wait), 1))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def shut_down() -> None:
    """Leaves the service; all processes do so at about the same time."""
    jax.distributed.shutdown()

"""Sends what processes ask one another for between their devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from shardjax.embed.joint import Ask
from shardjax.embed.span import DeviceSpan


@partial(jax.jit, static_argnames="mesh", donate_argnames="words")
def _exchange(words: jax.Array, *, mesh: jax.sharding.Mesh) -> jax.Array:
    """[requesters, owners, words] over the requesters to [owners, requesters, words] over
    the owners."""
    axes = tuple(mesh.axis_names)
    spec = jax.P(axes)

    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def exchange(own):
        return jax.lax.all_to_all(own[0], axes, 0, 0)[None]

    return exchange(words)


class KeyExchange:
    """Sends messages over the devices of a mesh.

    Args:
      mesh: of all processes.
      span: the devices, and which are this process's.

    Attributes:
      sent_bytes: of this process's messages so far, those to its own devices included.
    """

    def __init__(self, mesh: jax.sharding.Mesh, span: DeviceSpan):
        self._mesh, self._span = mesh, span
        self._sharding = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        self.sent_bytes = 0

    def send(self, ask: Ask) -> None:
        """Dispatches the exchange of a window; all processes at the same place."""
        if not ask.requests:
            ask.sent(lambda: ask.messages)
            return
        shape = self._span.total, *ask.messages.shape[1:]
        words = jax.make_array_from_process_local_data(
            self._sharding, ask.messages, shape
        )
        received = _exchange(words, mesh=self._mesh)
        received.copy_to_host_async()
        self.sent_bytes += ask.messages.nbytes
        ask.sent(_reader(received))

    def add(self, tree: Any) -> Any:
        """The sum over processes of NumPy arrays, bit by bit, of which at most one process
        has anything but zeros at a place; the same tree in all processes."""
        leaves, structure = jax.tree.flatten(tree)
        words = np.concatenate(
            [_as_bytes(x) for x in leaves] or [np.zeros(0, np.uint8)]
        )
        parts = np.zeros((self._span.count, len(words)), np.uint8)
        parts[0] = words
        shape = self._span.total, len(words)
        whole = jax.make_array_from_process_local_data(self._sharding, parts, shape)
        found = np.asarray(_add(whole, mesh=self._mesh).addressable_data(0))
        out, at = [], 0
        for x in leaves:
            own = found[at : at + x.nbytes]
            out.append(own.view(x.dtype).reshape(x.shape) if x.size else x)
            at += x.nbytes
        return jax.tree.unflatten(structure, out)


@partial(jax.jit, static_argnames="mesh")
def _add(words: jax.Array, *, mesh: jax.sharding.Mesh) -> jax.Array:
    total = words.sum(0, dtype=words.dtype)
    return jax.lax.with_sharding_constraint(total, jax.NamedSharding(mesh, jax.P()))


def _as_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _reader(received: jax.Array) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        shards = sorted(
            received.addressable_shards, key=lambda s: s.index[0].start or 0
        )
        parts: list[Any] = [np.asarray(shard.data) for shard in shards]
        return np.concatenate(parts)

    return read

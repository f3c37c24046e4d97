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


def _reader(received: jax.Array) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        shards = sorted(
            received.addressable_shards, key=lambda s: s.index[0].start or 0
        )
        parts: list[Any] = [np.asarray(shard.data) for shard in shards]
        return np.concatenate(parts)

    return read

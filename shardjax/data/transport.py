"""Bytes from every process to every other, by a collective of their devices.

Messages travel as int32 words, in rounds of bounded size, over one device of each process::

    process 0   [to 0 | to 1]          [from 0 | from 1]
    process 1   [to 0 | to 1]    ──▶   [from 0 | from 1]      one all_to_all a round

Their sizes are agreed on first, by a callable that is given, so that all take the same
number of rounds, also a process that has nothing to send. No round begins before the last
has ended: a process that falls behind makes the others wait, and nothing piles up.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardjax.data.shuffling import check_count
from shardjax.together import Agree

Exchange = Callable[[list[bytes]], list[bytes]]
"""Sends bytes, by the process they are for; gives those received, by the one they are from."""

_AXIS = "processes"
_LEAST_WORDS = 1024


class DeviceExchange:
    """Sends bytes between processes over one device of each; an `Exchange`.

    All processes call it equally often, and in the same place of the program between
    their other collectives: in the thread that dispatches the training steps.

    Args:
      agree: gives every process the bytes of all.
      devices: one of each process, in the order of processes; by default the first of each.
      round_bytes: how many bytes a process sends in a round, and receives, at most; at
        least 4 KB for each process.

    Raises:
      TypeError, ValueError: if devices are not one of each process in order, or
        `round_bytes` is not positive.

    Example:
      >>> exchange = DeviceExchange(lambda data: [data])
      >>> exchange([b"to myself"])
      [b'to myself']
    """

    def __init__(
        self,
        agree: Agree,
        *,
        devices: Sequence[jax.Device] | None = None,  # pyright: ignore
        round_bytes: int = 8 << 20,
    ):
        check_count("round_bytes", round_bytes)
        if devices is None:
            first = {}
            for device in jax.devices():
                first.setdefault(device.process_index, device)
            devices = [first[process] for process in sorted(first)]
        owners = [device.process_index for device in devices]
        if owners != list(range(jax.process_count())):
            raise ValueError(
                f"`devices` must be one of each of {jax.process_count()} processes, in"
                f" order, got those of {owners}. By default it is the first of each."
            )
        self._agree = agree
        self._processes = len(devices)
        self._device = devices[jax.process_index()]
        most = max(_LEAST_WORDS, round_bytes // 4 // self._processes)
        self._most_words = 1 << (most.bit_length() - 1)
        mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
        self._all_to_all = jax.jit(
            jax.shard_map(
                partial(
                    jax.lax.all_to_all, axis_name=_AXIS, split_axis=1, concat_axis=1
                ),
                mesh=mesh,
                in_specs=PartitionSpec(_AXIS),
                out_specs=PartitionSpec(_AXIS),
            )
        )

    def __call__(self, messages: list[bytes]) -> list[bytes]:
        """Sends a message to each process, and receives one of each.

        Args:
          messages: by the process they are for; they may be empty.

        Returns:
          Messages by the process they are from.

        Raises:
          ValueError: if there are not as many as processes.
        """
        if len(messages) != self._processes:
            raise ValueError(
                f"`messages` must be one for each of {self._processes} processes, got"
                f" {len(messages)}. Give b'' where there is nothing to send."
            )
        if self._processes == 1:
            return list(messages)
        told = self._agree(np.array([len(m) for m in messages], np.int64).tobytes())
        sizes = np.array([np.frombuffer(sent, np.int64) for sent in told])
        received = [bytearray(size) for size in sizes[:, jax.process_index()].tolist()]
        most = -(-int(sizes.max()) // 4)
        for words, at in rounds(most, self._most_words):
            sent = np.zeros((1, self._processes, words), np.int32)
            for row, message in zip(sent[0], messages, strict=True):
                part = np.frombuffer(message[4 * at : 4 * (at + words)], np.uint8)
                row.view(np.uint8)[: len(part)] = part
            for got, part in zip(received, self._round(sent), strict=True):
                room = len(got[4 * at : 4 * (at + words)])
                got[4 * at : 4 * at + room] = part.view(np.uint8)[:room].tobytes()
        return [bytes(got) for got in received]

    def _round(self, sent: np.ndarray) -> np.ndarray:
        """int32 [1, processes, words], by destination, to [processes, words] by source."""
        shape = (self._processes, *sent.shape[1:])
        local = [jax.device_put(sent, self._device)]
        whole = jax.make_array_from_single_device_arrays(shape, self._sharding, local)
        received = self._all_to_all(whole).addressable_data(0)
        return np.asarray(received)[0]


def rounds(words: int, most: int) -> list[tuple[int, int]]:
    """Splits a message into rounds of few different sizes, each of which is compiled.

    Args:
      words: of the longest message; 0 takes no round.
      most: words of a round at most, a power of two.

    Returns:
      The words of each round, a power of two, and the word it begins at.

    Example:
      >>> rounds(5000, 2048)
      [(2048, 0), (2048, 2048), (1024, 4096)]
    """
    found, at = [], 0
    while at < words:
        size = min(most, max(_LEAST_WORDS, 1 << (words - at - 1).bit_length()))
        found.append((size, at))
        at += size
    return found

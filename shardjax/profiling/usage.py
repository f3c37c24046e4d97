"""The memory that a compiled program needs, in the terms of each backend."""

from dataclasses import dataclass
from typing import Any

import jax

_GPU = ("gpu", "cuda", "rocm")


@dataclass(frozen=True)
class Memory:
    """Bytes that a compiled program needs on each device.

    Attributes:
      arguments: on the device, donated ones included.
      outputs: on the device, those in place of donated arguments included.
      aliased: part of the outputs that lies in donated arguments.
      temporaries: on the device while it runs; TPUs often report 0, see `peak`.
      host: arguments, outputs and temporaries in the memory of the host, for this
        device. CPU programs report none: there all memory counts as the device's.
      peak: the most that lies on the device at a time. That of a TPU program which makes
        arrays in the memory of the host is an upper bound.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int
    peak: int


def memory(compiled: Any, *, platform: str | None = None) -> Memory:
    """Reads the memory that a compiled program needs, without running it.

    The backends report it differently. The peak of a CPU program is the sum of what is
    alive (XLA's own figure leaves out temporaries). That of a TPU program excludes
    arguments in the memory of the host, which XLA includes. XLA includes what the program
    makes there too, but whether at the time of the peak it does not say.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns.
      platform: "cpu", "gpu" or "tpu"; default that of the devices of the program's
        arguments and outputs.

    Returns:
      Bytes per device.

    Raises:
      ValueError: if the platform is another or cannot be told, or the backend reports
        no memory.

    Example:
      >>> import jax.numpy as jnp
      >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(256)).compile()
      >>> memory(compiled).arguments, memory(compiled).outputs
      (1024, 1024)
    """
    platform = _platform(compiled) if platform is None else platform
    if platform not in ("cpu", "tpu", *_GPU):
        raise ValueError(
            "`platform` must be 'cpu', 'gpu' or 'tpu', got"
            f" {platform!r}. Name the one whose rules for memory apply."
        )
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            f"the backend {platform!r} must report the memory of a program, got none."
            " Compile for another, or measure device.memory_stats()."
        )
    host = (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes
    )
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        host=host,
        peak=_peak(stats, platform),
    )


def _peak(stats: Any, platform: str) -> int:
    alive = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    if platform == "cpu":
        return alive
    if platform != "tpu":
        return stats.peak_memory_in_bytes
    peak = stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
    return min(peak, alive) if stats.temp_size_in_bytes else peak  # 0: not reported


def _platform(compiled: Any) -> str:
    shardings = (compiled.input_shardings, compiled.output_shardings)
    for sharding in jax.tree.leaves(shardings):
        return next(iter(sharding.device_set)).platform
    raise ValueError(
        "`platform` must be given for a program without arguments and outputs, got None."
        " Give for example platform='cpu'."
    )

"""How close a step comes to what its devices can do."""

import time
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# Dense bf16 flops per second of one device as JAX names it in `device_kind`.
# TPUs: the system architecture pages of Google Cloud, cloud.google.com/tpu/docs/v4, v5e,
# v5p and v6e. GPUs: the "NVIDIA H100 Tensor Core GPU" data sheet (SXM 1979 TFLOPS with
# sparsity, half of that dense), that of the H200, and that of the A100 (312 TFLOPS).
PEAK_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "TPU v4": 275e12,
        "TPU v5 lite": 197e12,
        "TPU v5e": 197e12,
        "TPU v5": 459e12,
        "TPU v5p": 459e12,
        "TPU v6 lite": 918e12,
        "TPU v6e": 918e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100-PCIE-40GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H200": 989e12,
    }
)


def peak_flops(device_kind: str) -> float:
    """Looks up the data sheet's dense bf16 rate of a device.

    Args:
      device_kind: as in `jax.devices()[0].device_kind`.

    Returns:
      Flops per second of one device.

    Raises:
      ValueError: if the rate of this kind is not in `PEAK_FLOPS`.

    Example:
      >>> peak_flops("TPU v5p")
      459000000000000.0
    """
    if device_kind not in PEAK_FLOPS:
        raise ValueError(
            f"`device_kind` must be one of {', '.join(PEAK_FLOPS)}, got"
            f" {device_kind!r}. Measure its rate with measure_peak_flops(), or take it"
            " from the data sheet."
        )
    return PEAK_FLOPS[device_kind]


def mfu(
    flops_per_step: float,
    seconds_per_step: float,
    devices: int,
    peak_flops_per_device: float,
) -> float:
    """Gives the model flops utilization: the share of the peak rate that is used.

    By convention the flops are those the model needs, forward and backward, without
    what remat computes again: `count_flops` of the gradient of the loss without remat.

    Args:
      flops_per_step: flops of a step over all devices.
      seconds_per_step: duration of a step, seconds.
      devices: how many devices share the step.
      peak_flops_per_device: flops per second of one device, of `peak_flops` or
        `measure_peak_flops`.

    Returns:
      A fraction, 1.0 at the peak.

    Raises:
      ValueError: if a number is not positive (the flops may be 0).

    Example:
      >>> mfu(6e15, 2.0, devices=8, peak_flops_per_device=1e15)
      0.375
    """
    if not flops_per_step >= 0:
        raise ValueError(
            f"`flops_per_step` must not be negative, got {flops_per_step}. Give"
            " count_flops(...).total."
        )
    for name, value in [
        ("seconds_per_step", seconds_per_step),
        ("devices", devices),
        ("peak_flops_per_device", peak_flops_per_device),
    ]:
        if not value > 0:
            raise ValueError(
                f"`{name}` must be positive, got {value}. Give what was measured on at"
                " least one device."
            )
    return flops_per_step / (seconds_per_step * devices * peak_flops_per_device)


def measure_peak_flops(
    size: int = 2048,
    *,
    dtype: DTypeLike = jnp.float32,
    products: int = 8,
    repeats: int = 5,
    device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> float:
    """Measures the rate of a large matrix product on a device.

    It is what XLA reaches at best, not what a data sheet promises, and lies below it: a
    utilization against it says how far a step is from one large product of this dtype.
    Simulated CPU devices share the cores of their host, and one alone may use them all:
    give `mfu` one device then. Accelerators need a large `size`, such as 8192, for the
    start of the program not to count.

    Args:
      size: rows and columns of the matrices.
      dtype: of the matrices.
      products: matrix products per timing, one after the other.
      repeats: timings, of which the fastest counts.
      device: where to measure; default the first.

    Returns:
      Flops per second.

    Raises:
      ValueError: if `size`, `products` or `repeats` is not positive.

    Example:
      >>> measure_peak_flops(64, repeats=2) > 0
      True
    """
    for name, value in [("size", size), ("products", products), ("repeats", repeats)]:
        if value < 1:
            raise ValueError(f"`{name}` must be positive, got {value}. Give 1 or more.")

    def chain(x):
        y = x
        for _ in range(products):
            y = y @ x  # 1/size everywhere, again
        return y

    host = np.full((size, size), 1 / size, jnp.dtype(dtype))
    x = jax.device_put(host, jax.devices()[0] if device is None else device)
    program = jax.jit(chain).lower(x).compile()
    jax.block_until_ready(program(x))
    seconds = min(_seconds(program, x) for _ in range(repeats))
    return 2 * size**3 * products / seconds


def _seconds(program, x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    return time.perf_counter() - start

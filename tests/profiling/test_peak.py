"""Utilization, known and measured peaks."""

import jax.numpy as jnp
import pytest

from shardjax.profiling import PEAK_FLOPS, measure_peak_flops, mfu, peak, peak_flops


def test_mfu_is_the_share_of_the_peak():
    assert mfu(197e12 * 4 * 0.5 * 2.0, 2.0, 4, peak_flops("TPU v5e")) == 0.5
    assert mfu(0, 1.0, 1, 1.0) == 0.0


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("seconds_per_step", (1.0, 0.0, 1, 1.0)),
        ("devices", (1.0, 1.0, 0, 1.0)),
        ("peak_flops_per_device", (1.0, 1.0, 1, -1.0)),
        ("peak_flops_per_device", (1.0, 1.0, 1, float("nan"))),
    ],
)
def test_mfu_refuses_what_is_not_positive(name, numbers):
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got .* Give"):
        mfu(*numbers)


def test_mfu_refuses_negative_flops():
    with pytest.raises(
        ValueError, match="`flops_per_step` must not be negative, got -1"
    ):
        mfu(-1, 1.0, 1, 1.0)


def test_known_peaks():
    assert peak_flops("TPU v4") == 275e12
    assert peak_flops("TPU v5 lite") == peak_flops("TPU v5e") == 197e12
    assert peak_flops("TPU v6 lite") == 918e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    with pytest.raises(TypeError, match="not support item assignment"):
        PEAK_FLOPS["cpu"] = 1.0


def test_an_unknown_device_is_to_be_measured():
    with pytest.raises(ValueError, match=r"one of TPU v4, .* got 'cpu'. Measure its"):
        peak_flops("cpu")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_peak_can_be_measured(dtype):
    rate = measure_peak_flops(128, dtype=dtype, products=2, repeats=2)
    assert 1e6 < rate < 1e16


def test_the_fastest_timing_counts(monkeypatch):
    times = iter([3.0, 0.5, 2.0])
    monkeypatch.setattr(peak, "_seconds", lambda *_: next(times))
    assert measure_peak_flops(8, products=3, repeats=3) == 2 * 8**3 * 3 / 0.5


@pytest.mark.parametrize("name", ["size", "products", "repeats"])
def test_measuring_refuses_nothing_to_do(name):
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got 0. Give 1"):
        measure_peak_flops(**{"size": 8, name: 0})

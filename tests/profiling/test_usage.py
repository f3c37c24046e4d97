"""Memory of compiled programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardjax.mesh import make_mesh
from shardjax.partition import named_shardings
from shardjax.profiling import Memory, memory

pytestmark = pytest.mark.usefixtures("fused")

STATS = dict(
    argument_size_in_bytes=100,
    output_size_in_bytes=50,
    alias_size_in_bytes=40,
    temp_size_in_bytes=7,
    host_argument_size_in_bytes=30,
    host_output_size_in_bytes=20,
    host_alias_size_in_bytes=10,
    host_temp_size_in_bytes=5,
    peak_memory_in_bytes=500,
)


def _compiled(stats=STATS, shardings=()):
    return SimpleNamespace(
        memory_analysis=lambda: None if stats is None else SimpleNamespace(**stats),
        input_shardings=shardings,
        output_shardings=(),
    )


@pytest.mark.parametrize(
    ("platform", "peak"),
    [
        ("cpu", 100 + 50 - 40 + 7),
        ("tpu", 100 + 50 - 40 + 7),
        ("gpu", 500),
        ("cuda", 500),
    ],
)
def test_each_backend_has_its_own_peak(platform, peak):
    assert memory(_compiled(), platform=platform) == Memory(100, 50, 40, 7, 45, peak)


@pytest.mark.parametrize(
    ("changes", "peak"),
    [({"peak_memory_in_bytes": 140}, 110), ({"temp_size_in_bytes": 0}, 470)],
)
def test_arguments_on_the_host_are_not_in_the_peak_of_a_tpu(changes, peak):
    assert memory(_compiled(STATS | changes), platform="tpu").peak == peak


def test_a_program_on_a_mesh_is_told_per_device():
    mesh = make_mesh("4x2")
    sharding = named_shardings(P("data", "model"), mesh)
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)
    program = jax.jit(lambda x: jnp.tanh(x), out_shardings=sharding, donate_argnums=0)
    found = memory(program.lower(x).compile())
    share = 64 * 32 * 4 // 8
    assert (found.arguments, found.outputs, found.aliased) == (share, share, share)
    assert found.host == 0
    assert found.peak == share + found.temporaries


def test_temporaries_are_in_the_peak():
    def f(x):
        return jnp.sort(x @ x, axis=0) @ x

    compiled = jax.jit(f).lower(jnp.ones((64, 64))).compile()
    found = memory(compiled)
    assert found.temporaries >= 64 * 64 * 4
    assert found.peak == 2 * 64 * 64 * 4 + found.temporaries


def test_the_platform_must_be_known():
    with pytest.raises(
        ValueError, match="`platform` must be 'cpu', .* got 'metal'. Name"
    ):
        memory(_compiled(), platform="metal")
    with pytest.raises(
        ValueError, match="`platform` must be given for a program without"
    ):
        memory(_compiled())


def test_a_backend_that_reports_nothing_is_refused():
    with pytest.raises(ValueError, match="'cpu' must report the memory .* got none"):
        memory(_compiled(None), platform="cpu")

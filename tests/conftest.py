"""Set-up of the whole suite: 8 simulated CPU devices, strict JAX, no leaks."""

import os
import tempfile
import threading
import time

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

# Before any JAX operation. Tests run on the CPU also where there is an accelerator,
# unless JAX_PLATFORMS asks for it (`-m gpu`).
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests compile the same program: keep what took long to compile until the run ends.
_programs = tempfile.TemporaryDirectory(prefix="shardjax-programs-")
jax.config.update("jax_compilation_cache_dir", _programs.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_configure(config):
    """Programs run a few times here, so LLVM need not optimize them: their HLO is the
    same, and they are ready in half the time. But not those of modules that use
    `optimized`, nor of processes that tests start."""
    if not config.getoption("--all-combinations"):
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def optimized():
    """Compiles the programs of a module as those of users: for what two programs that
    are compiled in another way need not have in common, such as each bit."""
    fast = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", fast)


# Modules whose jaxtyping shapes and annotations are checked at run time. Not all of the
# package: the hook wraps every function, which numba kernels do not survive, and it
# answers wrong kinds of arguments before our own messages do.
install_import_hook(["shardjax.models"], "beartype.beartype")

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    """What a run can ask for that the usual one leaves out."""
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="every mesh with every optimizer and so on where a usual run has a part of"
        " them that has each pair (test_tiers, test_tiers_at_length, zero/test_step), 30"
        " kills in checkpoint/test_crashes, and programs that are compiled as those of"
        " users",
    )


MESHES = ("1x1", "8x1", "1x8", "4x2", "2x4")


@pytest.fixture(params=MESHES)
def mesh(request):
    """Each mesh of the suite; the id is its shape."""
    from shardjax.mesh import make_mesh

    return make_mesh(request.param)


@pytest.fixture(autouse=True)
def no_leaks():
    """No test leaves behind a changed environment or a running thread."""
    environment = _environment()
    threads = set(threading.enumerate())
    yield
    assert _environment() == environment, "the test changed os.environ"
    assert not _left_over(threads), "the test left threads running"


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}


def _left_over(before: set[threading.Thread], grace: float = 2.0) -> list[str]:
    """Names of threads started since `before` that outlive `grace` seconds."""
    end = time.monotonic() + grace
    left = [t for t in threading.enumerate() if t not in before]
    for thread in left:
        thread.join(max(0.0, end - time.monotonic()))
    return [t.name for t in left if t.is_alive()]

"""Set-up of the whole suite: 8 simulated CPU devices, strict JAX, no leaks."""

import os
import sys
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
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


# What the compiler is told here and not by users: see `pytest_configure`.
_in_short: dict[str, str | bool] = {}


def pytest_configure(config):
    """Programs run a few times here, so LLVM need not optimize them: their HLO is the
    same, and they are ready in half the time. Without the emitters of fusions they are
    ready in a third of that, but their HLO is another (a scatter becomes a loop). So too
    the programs of processes that tests start. Not so those of modules that use `fused` or
    `optimized`; and none at all with `--all-combinations`."""
    if not config.getoption("--all-combinations"):
        # What xdist's workers inherit, their `fused` could not take back.
        works = hasattr(config, "workerinput") or not config.getoption("numprocesses")
        jax.config.update("jax_disable_most_optimizations", True)
        _tell_compiler(works, xla_cpu_use_fusion_emitters=False)


def _tell_compiler(works: bool, **options):
    """Options for each program, which JAX takes per call of `compile` alone, and other
    processes as flags. A JAX or XLA that takes them no more only makes the suite slower."""
    compiler = sys.modules.get("jax._src.compiler")
    made_by_jax = getattr(compiler, "get_compile_options", None)
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except (RuntimeError, ValueError):
        made_by_jax = None
    if made_by_jax is None:
        return

    def get_compile_options(*args, env_options_overrides=None, **kwargs):
        asked = _in_short | (env_options_overrides or {})  # what a call asks for wins
        return made_by_jax(*args, env_options_overrides=asked, **kwargs)

    setattr(compiler, "get_compile_options", get_compile_options)  # noqa: B010
    _in_short.update(options)
    if not works:
        return
    # This process has read its flags: `fused` can still take the options back.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    flags = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), *flags]
    ).strip()


@pytest.fixture(scope="module")
def fused():
    """Gives the programs of a module the HLO of those of users: for tests that read it, how
    much memory it needs, or each bit of programs that differ."""
    options = dict(_in_short)
    jax.clear_caches()
    _in_short.clear()
    yield
    jax.clear_caches()
    _in_short.update(options)


@pytest.fixture(scope="module")
def optimized(fused):
    """Compiles the programs of a module as those of users: for what two programs that
    are compiled in another way need not have in common, such as each bit."""
    fast = jax.config.read("jax_disable_most_optimizations")
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

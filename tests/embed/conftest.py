"""Set-up of the embedding tests."""

import jax
import pytest


@pytest.fixture(autouse=True)
def compile_fast():
    """Programs run a few times here, so LLVM need not optimize them: their HLO is the
    same, and they are ready in half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

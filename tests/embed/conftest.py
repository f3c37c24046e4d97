"""Set-up of the embedding tests."""

import jax
import pytest


@pytest.fixture(autouse=True)
def compile_fast(request):
    """Programs run a few times here, so XLA need not optimize them.

    Not where the module says `OPTIMIZED = True`: it looks at the programs themselves.
    """
    fast = not getattr(request.module, "OPTIMIZED", False)
    jax.config.update("jax_disable_most_optimizations", fast)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

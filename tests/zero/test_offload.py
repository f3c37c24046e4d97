"""State in the host's memory: the same numbers as without, and where all lies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardjax as sj
from shardjax import zero
from tests.zero.small import RULES, make_loss, plan_small, small_batch, train

OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(optax.linear_schedule(1e-2, 1e-3, 4), eps=1e-3),
}


def assert_equal(state, expected):
    """Bit for bit, wherever it lies."""
    got, wanted = jax.device_get((state, expected))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", ["2x1", "4x2"])
@pytest.mark.parametrize("stage", zero.STAGES)
def test_offloading_changes_no_bit(optimizer, mesh, stage):
    tx = OPTIMIZERS[optimizer]
    rules = RULES if mesh == "4x2" else ()
    options = {"steps": 4, "microbatches": 2, "clip_norm": 0.5}
    plain, infos = train(plan_small(mesh, stage, tx, rules), tx, **options)
    plan = plan_small(mesh, stage, tx, rules, offload="opt_state")
    state, same_infos = train(plan, tx, **options)
    assert infos == same_infos
    assert_equal(state, plain)

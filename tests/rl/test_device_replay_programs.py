"""Programs with a replay on a device: in `jit` and `scan`, with the state donated."""

import jax
import jax.numpy as jnp
import pytest

from shardjax import rl

pytestmark = pytest.mark.usefixtures("optimized")

REPLAY = rl.DeviceReplay(70_000, rl.Proportional())  # 4375 nodes of leaves


def learn(state, key):
    """Five steps that add, draw and set priorities."""

    def turn(state, key):
        state, _ = REPLAY.add(state, {"x": jnp.arange(64, dtype=jnp.int32)})
        batch = REPLAY.sample(state, key, 32)
        priorities = batch.items["x"].astype(jnp.float32)
        state, applied = REPLAY.set_priorities(state, batch.ids, priorities)
        return state, applied.all()

    return jax.lax.scan(turn, state, jax.random.split(key, 5))


def test_no_step_copies_what_is_of_the_size_of_the_replay():
    state = REPLAY.init({"x": jnp.int32(0)})
    program = jax.jit(learn, donate_argnums=0)
    compiled = program.lower(state, jax.random.key(0)).compile()
    sizes = [f"[{n}" for n in (70_000, 70_016, 4375)]
    lines = compiled.as_text().splitlines()
    assert any(size in line for size in sizes for line in lines)
    copies = [x for x in lines if " copy(" in x and any(size in x for size in sizes)]
    assert copies == []
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.2 * memory.argument_size_in_bytes
    state, applied = compiled(state, jax.random.key(0))
    assert applied.all() and int(state.size) == 320

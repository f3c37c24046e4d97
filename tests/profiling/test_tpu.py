"""What the compiler of TPUs writes; it needs the package libtpu and no TPU."""

import importlib.util

import pytest

from tests.helpers import run_python

PROGRAM = """
import os
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
import jax, jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc
from jax.sharding import NamedSharding, PartitionSpec as P
from shardjax import make_mesh
from shardjax.profiling import collectives, memory, wire_bytes

LAYERS, DIM = 6, 512
devices = get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = make_mesh("8x1", devices=devices)

def spec(shape, spec, kind="device"):
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

def step(layers, momentum, x):
    def loss(layers):
        forward = lambda x, w: (x + jnp.tanh(x @ w), None)
        return (jax.lax.scan(forward, x, layers)[0] ** 2).sum()
    momentum = jax.device_put(momentum, jax.memory.Space.Device)
    momentum = 0.9 * momentum + jax.grad(loss)(layers)
    return layers - momentum, jax.device_put(momentum, jax.memory.Space.Host)

args = (
    spec((LAYERS, DIM, DIM), P()),
    spec((LAYERS, DIM, DIM), P(None, "data"), "pinned_host"),
    spec((256, DIM), P("data")),
)
out = (args[0].sharding, args[1].sharding)
step = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
compiled = step.lower(*args).compile()
found = collectives(compiled, devices=mesh)
sums = wire_bytes(found)
parameters = LAYERS * DIM * DIM * 4
share = 7 / 8 * parameters
assert sums.by_kind == {"reduce-scatter": share, "all-gather": share}, found
assert sums.by_axes == {("data",): 2 * share}, found
assert {one.kind: one.times for one in found}["reduce-scatter"] == LAYERS, found
used = memory(compiled)
assert used.host == parameters // 8, used
assert parameters < used.arguments < used.peak < 4 * parameters, used
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_sharded_optimizer_step_of_tpus():
    run_python(PROGRAM)

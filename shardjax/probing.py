"""How fast a process's devices are, measured where nobody waits for another process.

All processes take equally long for a step, as they wait for each other in it, and what a
device did before it waited cannot be seen from the host. So the pass through the network is
timed alone: a program without collectives, on the devices of this process.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.data.shuffling import check_count
from shardjax.embed import EmbeddingCollection
from shardjax.network import Network, finish_logits
from shardjax.precision import Precision


def make_probe(
    network: Network,
    collection: EmbeddingCollection,
    *,
    n_dense: int,
    block_size: int,
    blocks: int = 4,
    precision: Precision | str = "f32",
) -> Callable[[], float]:
    """Makes what times the pass of some blocks through the network and back.

    Call it when the devices have nothing to do, in all processes after the same step, and
    give the result to `shardjax.data.BlockShare.observe`.

    It sees whatever makes these devices slow just then: the model of the machine, its clock,
    other programs on it. It does not see slow reading, planning or network cards, nor what
    depends on the values; blocks that take less than a millisecond are mostly noise. The
    parameters of the network are on each device once more, whole, whatever the ZeRO stage.

    Args:
      network: as of `make_train_step`; its `params` are concrete.
      collection: the tables, for what the network gets of them.
      n_dense: numbers of an example that are no keys.
      block_size: examples per device.
      blocks: how many to time, one after the other. They should take longer than the
        slices in which an operating system deals out its cores, some ms.
      precision: as of `shardjax.plan_network`.

    Returns:
      `probe()`: seconds of the `blocks`, on the device that took longest.

    Raises:
      TypeError, ValueError: for a number that is none, or too small.

    Example:
      >>> import shardjax as sj
      >>> from flax import nnx
      >>> from shardjax.network import from_nnx
      >>> table = sj.embed.TableSpec("item", dim=1)
      >>> tables = sj.embed.EmbeddingCollection(
      ...     {"item": sj.embed.FeatureSpec(table)}, mesh=sj.make_mesh("1x1"))
      >>> model = sj.models.LogisticRegression(
      ...     features=("item",), n_dense=2, rngs=nnx.Rngs(0))
      >>> probe = make_probe(from_nnx(model), tables, n_dense=2, block_size=8)
      >>> probe() > 0
      True
    """
    check_count("block_size", block_size)
    check_count("blocks", blocks)
    compute = Precision.parse(precision).compute
    rng = np.random.default_rng(0)

    def is_float(x):
        return jnp.issubdtype(x.dtype, jnp.floating)

    def numbers(x):
        shape = blocks, *x.shape
        # of sizes as those that are learnt; masks are true
        made = rng.normal(0, 0.01, shape) if is_float(x) else np.ones(shape)
        return made.astype(x.dtype)

    def cast(tree):
        if compute is None:
            return tree
        return jax.tree.map(lambda x: x.astype(compute) if is_float(x) else x, tree)

    embeddings = collection.example_embeddings(block_size)
    dense = np.zeros((block_size, n_dense), np.float32)
    inputs = jax.tree.map(numbers, (dense, embeddings))

    def loss_of(params, embeddings, dense, state):
        dense, embeddings = cast((dense, embeddings))
        logits, _ = network.apply(cast(params), state, dense, embeddings, train=True)
        return jnp.sum(jnp.square(finish_logits(logits, block_size)))

    @jax.jit
    def run(params, state, inputs):
        def one(total, block):
            dense, embeddings = block
            both = jax.grad(loss_of, argnums=(0, 1), allow_int=True)
            grads, row_grads = both(params, embeddings, dense, state)
            floats = [x for x in jax.tree.leaves(row_grads) if is_float(x)]
            return jax.tree.map(jnp.add, total, grads), floats

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), inputs)

    here = jax.process_index()
    arguments = [
        jax.device_put((network.params, network.state, inputs), device)
        for device in collection.mesh.devices.flat
        if device.process_index == here
    ]

    def probe() -> float:
        begun = time.perf_counter()
        jax.block_until_ready([run(*each) for each in arguments])
        return time.perf_counter() - begun

    probe()  # compiles
    return probe

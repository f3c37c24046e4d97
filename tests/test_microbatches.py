"""The loop over microbatches that ends with the last one that counts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardjax import plan_network
from shardjax.data.batch import Batch
from shardjax.embed import EmbeddingCollection
from shardjax.mesh import make_mesh
from shardjax.metrics import Mean, Sum
from shardjax.microbatches import in_microbatches
from shardjax.network import Network, from_nnx
from shardjax.state import compute_metrics, init_state
from shardjax.train import make_train_step, prepare
from tests.test_train import (
    CLOSE,
    FEATURES,
    NnxModel,
    assert_close,
    make_batch,
    plain_network,
    read,
)

TX = optax.sgd(0.1)


def grad_of(params, blocks, state, x, y):
    """Of params * blocks * x; the state counts calls and examples."""
    value = jnp.sum(params * blocks * x)
    grads = jnp.sum(blocks * x), params * x
    return grads, (value, blocks + 1, y + 1, state + jnp.array([1, len(x)]))


@pytest.mark.parametrize("size", [None, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("last", [0, 1, 2, 3, 6, 7])
def test_what_lies_behind_the_last_that_counts_is_not_computed(size, last):
    """Also if what comes before has gaps."""
    x = jnp.arange(1.0, 8.0) * (np.arange(7) < last)
    counts = (np.arange(7) < last) & (np.arange(7) % 3 != 1) | (
        np.arange(7) == last - 1
    )
    arguments = size, jnp.float32(2), jnp.zeros(2, int), jnp.arange(7.0), (x, x)
    every = in_microbatches(grad_of, *arguments)
    length = 7 if size is None else -(-7 // -(-7 // size))
    spoilt = jnp.where(np.arange(7) < -(-last // length) * length, x, jnp.nan)
    arguments = *arguments[:-1], (spoilt, spoilt)
    found = in_microbatches(grad_of, *arguments, jnp.array(counts))
    jax.tree.map(np.testing.assert_array_equal, found[:3], every[:3])
    logits, losses, (turns, _) = found[3]
    assert turns == -(-last // length)
    assert logits.shape == losses.shape == (7,)
    done = min(int(turns) * length, 7)
    np.testing.assert_array_equal(logits[:done], every[3][0][:done])
    assert not logits[done:].any() and not losses[done:].any()


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("psum", jax.lax.psum),
        ("all_gather", jax.lax.all_gather),
        ("reduce_scatter", partial(jax.lax.psum_scatter, tiled=True)),
    ],
)
def test_devices_that_wait_for_each_other_are_refused(name, collective):
    def apply(params, state, dense, embeddings, *, train):
        @jax.checkpoint
        def inner(x):
            return jnp.sum(collective(jnp.tile(x, 8), "data"))

        return dense @ params["w"] + 0 * inner(params["w"]), state

    network = Network(apply, {"w": np.ones(2, np.float32)}, {})
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh("8x1"))
    state = init_state(network, TX, collection)
    batch = prepare(collection, make_batch(0, 16), train=True)
    step = make_train_step(network, TX, collection, skip_padding=True)
    with pytest.raises(
        ValueError, match=f"`skip_padding` needs .* got one with .*{name}"
    ):
        jax.eval_shape(partial(step.jitted, layout=batch.layout), state, batch.packed)


def dealt(batch: Batch, devices: int, each: int, room: int, of: int) -> Batch:
    """A batch on the first `of` devices, `each` examples, with padding up to `room`."""
    place = np.arange(devices * room)
    device, at = place // room, place % room
    real = (device < of) & (at < each)
    batch = batch.take(np.where(real, device * each + at, 0))
    return Batch(**{**vars(batch), "weights": np.where(real, batch.weights, 0)})


METRICS = {"examples": Sum("weights"), "loss": Mean("loss")}


def train(mesh, network, batches, *, stage=0, **more):
    """Everything a run has learnt; a loss per step."""
    collection = EmbeddingCollection(FEATURES, mesh=make_mesh(mesh))
    plan = plan_network(network, TX, collection, stage, min_bytes=0)
    state = init_state(network, TX, collection, METRICS, zero=plan)
    step = make_train_step(network, TX, collection, zero=plan, **more)
    losses, layouts = [], set()
    for batch in batches:
        batch = prepare(collection, batch, train=True)
        layouts.add(batch.layout)
        state, info = step(state, batch)
        losses.append(float(info["loss"]))
    # one program for all counts; and one for the state that is given first
    assert step.jitted._cache_size() <= len(layouts) + 1
    keys = jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        ),
        state.model_state,
    )
    return {
        "losses": losses,
        "metrics": compute_metrics(state.metrics),
        "state": jax.tree.map(np.asarray, keys),
    } | read(collection, state)


@pytest.mark.parametrize(("mesh", "stage"), [("8x1", 0), ("8x1", 3), ("4x2", 2)])
def test_skipping_changes_no_bit(mesh, stage):
    """Full devices, some, none, and examples without weight among the others."""
    batches = [make_batch(0, 48)]
    batches += [
        dealt(make_batch(i, 48), 8, each, 6, of)
        for i, each, of in ((1, 3, 8), (2, 6, 2), (3, 2, 5))
    ]
    batches.append(Batch(**{**vars(make_batch(4, 48)), "weights": np.zeros(48)}))
    holes = make_batch(5, 48).weights * (np.arange(48) % 5 != 2)
    batches.append(Batch(**{**vars(make_batch(5, 48)), "weights": holes}))
    runs = [
        train(
            mesh,
            plain_network(),
            batches,
            stage=stage,
            microbatch_size=2,
            skip_padding=skip,
        )
        for skip in (True, False)
    ]
    jax.tree.map(np.testing.assert_array_equal, *runs)
    assert runs[0]["losses"][4] == 0


class Counted(NnxModel):
    """Batch norm, dropout, and how often it was called."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros([], jnp.int32))
        self.called = nnx.Variable(jnp.array(False))

    def __call__(self, dense, embeddings):
        self.calls[...] += 1
        self.called[...] = jnp.array(True)
        return super().__call__(dense, embeddings)


def test_the_state_of_a_model_does_not_see_what_is_skipped():
    """Four devices of eight with room for more have what four have."""
    real = [make_batch(i, 16) for i in range(3)]
    padded = [dealt(batch, 8, 4, 6, 4) for batch in real]
    few, many = [
        train(
            mesh,
            from_nnx(Counted(nnx.Rngs(3))),
            batches,
            microbatch_size=2,
            skip_padding=skip,
        )
        for mesh, batches, skip in (("4x1", real, False), ("8x1", padded, True))
    ]
    used = {n: few["tables"][n].pop("found") for n in few["tables"]}
    for name, found in used.items():
        np.testing.assert_array_equal(many["tables"][name].pop("found"), found)
        assert found.any()
    assert_close(few, many, **CLOSE)
    counts = [x for x in jax.tree.leaves(many["state"]) if x.dtype == np.int32]
    assert [int(x) for x in counts] == [6]


def test_a_batch_without_weight_leaves_the_state_as_it_is():
    empty = Batch(**{**vars(make_batch(1, 16)), "weights": np.zeros(16)})
    network = from_nnx(Counted(nnx.Rngs(3)))
    found = train("8x1", network, [empty], microbatch_size=1, skip_padding=True)
    assert found["losses"] == [0]
    kept = [x for x in jax.tree.leaves(network.state) if x.dtype == np.float32]
    state = [x for x in jax.tree.leaves(found["state"]) if x.dtype == np.float32]
    assert len(kept) == 2
    jax.tree.map(np.testing.assert_array_equal, state, kept)
    jax.tree.map(np.testing.assert_array_equal, found["params"], network.params)

"""A small residual network on token ids, its data, and ways to train it, for the tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardjax as sj
from shardjax import zero
from shardjax.remat import scan_layers

VOCABULARY, LAYERS, DIM, HIDDEN = 40, 3, 16, 32
EXAMPLES = 32
RULES = [
    ("blocks/w1$", P(None, None, "model")),
    ("blocks/w2$", P(None, "model", None)),
    ("embedding", P("model", None)),
]
BLOCKS = ("^blocks/",)


def small_params(seed: int = 0) -> dict:
    """Stacked layers, a tied embedding, a leaf that no 8 divides, and one of int32."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        scale = 1 / np.sqrt(shape[-2])
        return (random.normal(size=shape) * scale).astype(np.float32)

    return {
        "embedding": normal(VOCABULARY, DIM),
        "blocks": {
            "w1": normal(LAYERS, DIM, HIDDEN),
            "w2": normal(LAYERS, HIDDEN, DIM),
            "scale": np.ones((LAYERS, DIM), np.float32),
        },
        "bias": np.zeros(VOCABULARY + 1, np.float32),
        "count": np.int32(3),
    }


def make_loss(remat: str = "none"):
    """A loss whose layers gather their own parameters."""

    def layer(x, params):
        params = zero.gather(params)
        return x + jnp.tanh((x * params["scale"][None]) @ params["w1"]) @ params["w2"]

    def loss(params, batch):
        x = params["embedding"][batch["x"]]
        x = scan_layers(layer, x, params["blocks"], remat=remat)
        logits = (x @ params["embedding"].T + params["bias"][None, :-1]).astype(
            jnp.float32
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])

    return loss


def small_batch(step: int, examples: int = EXAMPLES) -> dict:
    """Random tokens; weights that differ much between microbatches."""
    random = np.random.default_rng(1000 + step)
    weight = random.random(examples) < np.linspace(0.1, 1, examples)
    return {
        "x": random.integers(0, VOCABULARY, examples),
        "y": random.integers(0, VOCABULARY, examples),
        "weight": weight.astype(np.float32),
    }


def plan_small(mesh: str, stage: int, tx, rules=(), params=None, **options):
    """A plan of the small network that splits all it can."""
    options = {"blocks": BLOCKS, "min_bytes": 0} | options
    params = small_params() if params is None else params
    return zero.plan_zero(params, tx, sj.make_mesh(mesh), stage, rules, **options)


def train(
    plan,
    tx,
    *,
    steps=20,
    remat="none",
    params=None,
    loss=None,
    batch=small_batch,
    **options,
):
    """Trains; returns the state and what the steps told, as numbers."""
    state = zero.init_state(small_params() if params is None else params, tx, plan)
    step = zero.make_step(loss or make_loss(remat), tx, plan, **options)
    infos = []
    for i in range(steps):
        state, info = step(state, batch(i))
        infos.append(info)
    return state, [jax.tree.map(float, info) for info in infos]


def distance(tree, other) -> float:
    """The largest relative distance of two leaves, by their norms."""

    def apart(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    return max(
        apart(a, b)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    )

"""The blocks of a transformer: their parameters, stacked, and what one computes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from shardjax.partition import Rules
from shardjax.sharded import gather

TP_RULES: Rules = (
    ("blocks/qkv", P(None, None, None, "model", None)),  # whole heads
    ("blocks/attention_out", P(None, "model", None, None)),
    ("blocks/mlp_in", P(None, None, "model")),
    ("blocks/mlp_out", P(None, "model", None)),
)
"""Tensor parallelism: what makes heads and hidden units is split by its output, what reads
them by its input, so a block sums over the axis ``model`` twice. All else is whole."""

NAMES = ("block_in", "attention", "mlp_hidden")
"""What remat choices such as "save:attention" can name: a block's input, the output of its
attention before it is projected, and its hidden units before the GELU."""


class Blocks(nnx.Module):
    """The parameters of all blocks, stacked; `GPT` runs them.

    Attributes:
      qkv: [layers, dim, 3, heads, head_dim], to queries, keys and values.
      attention_out: [layers, heads, head_dim, dim].
      mlp_in: [layers, dim, hidden].
      mlp_out: [layers, hidden, dim].
      attention_norm, mlp_norm: [layers, dim], what the norms' scales are above 1.

    Example:
      >>> blocks = Blocks(dim=8, layers=2, heads=2, hidden=32, rngs=nnx.Rngs(0))
      >>> blocks.qkv.shape
      (2, 8, 3, 2, 4)
    """

    def __init__(
        self, *, dim: int, layers: int, heads: int, hidden: int, rngs: nnx.Rngs
    ):
        """Draws the weights.

        Args:
          dim, layers, heads, hidden: as of `GPT`.
          rngs: where the initial weights come from.
        """

        def normal(*shape, inputs, scale=1.0):
            values = jax.random.normal(rngs.params(), (layers, *shape))
            return nnx.Param(scale * inputs**-0.5 * values)

        # Each block adds to the residual stream twice: what 2 * layers of them add
        # together is as large as what one would add with a scale of 1.
        depth = (2 * layers) ** -0.5
        head_dim = dim // heads
        self.qkv = normal(dim, 3, heads, head_dim, inputs=dim)
        self.attention_out = normal(heads, head_dim, dim, inputs=dim, scale=depth)
        self.mlp_in = normal(dim, hidden, inputs=dim)
        self.mlp_out = normal(hidden, dim, inputs=hidden, scale=depth)
        self.attention_norm = nnx.Param(jnp.zeros((layers, dim)))
        self.mlp_norm = nnx.Param(jnp.zeros((layers, dim)))


def stacked_params(blocks: Blocks) -> dict[str, PyTree]:
    """The parameters of blocks by name: arrays, or parts of them (`shardjax.gather`).

    Args:
      blocks: those of a `GPT`.

    Returns:
      A dict with a leading dim of the layers on each leaf.

    Example:
      >>> blocks = Blocks(dim=8, layers=2, heads=2, hidden=32, rngs=nnx.Rngs(0))
      >>> sorted(stacked_params(blocks))[:2]
      ['attention_norm', 'attention_out']
    """
    return {
        k: v.get_value() for k, v in vars(blocks).items() if isinstance(v, nnx.Param)
    }


def apply_block(
    x: Float[Array, "batch seq dim"], layer: PyTree, *, turns: np.ndarray | None
) -> Float[Array, "batch seq dim"]:
    """One block: attention and an MLP, each added to what it reads after a norm.

    Args:
      x: the residual stream.
      layer: parameters of one layer, of `stacked_params`, whole or in parts.
      turns: of `rotary_turns`, or None.

    Returns:
      The residual stream after the block, in the dtype of `x`.

    Example:
      >>> blocks = Blocks(dim=8, layers=2, heads=2, hidden=32, rngs=nnx.Rngs(0))
      >>> layer = jax.tree.map(lambda a: a[0], stacked_params(blocks))
      >>> apply_block(jnp.ones((3, 5, 8)), layer, turns=rotary_turns(5, 4)).shape
      (3, 5, 8)
    """
    layer = gather(layer)
    x = checkpoint_name(x, "block_in")
    x = x + _attention(layer, rms_norm(x, layer["attention_norm"]), turns)
    return x + _mlp(layer, rms_norm(x, layer["mlp_norm"]))


def rms_norm(
    x: Float[Array, "batch seq dim"], scale: Float[Array, " dim"]
) -> Float[Array, "batch seq dim"]:
    """Divides by the root mean square over the last dim, computed in float32.

    Args:
      x: what to norm.
      scale: what each dim is multiplied by afterwards, less 1.

    Returns:
      The same shape and dtype.

    Example:
      >>> rms_norm(jnp.array([[[3.0, 3.0]]]), jnp.zeros(2)).round(3).tolist()
      [[[1.0, 1.0]]]
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = (
        wide * jax.lax.rsqrt(mean + 1e-6) * (1.0 + scale.astype(wide.dtype)[None, None])
    )
    return wide.astype(x.dtype)


def _attention(layer: dict, x: Float[Array, "batch seq dim"], turns):
    qkv = jnp.einsum("bsd,dthk->tbhsk", x, layer["qkv"])
    q, k, v = qkv[0], qkv[1], qkv[2]
    if turns is not None:
        q, k = _rotate(q, turns), _rotate(k, turns)
    mixed = checkpoint_name(_attend(q, k, v), "attention")
    return jnp.einsum("bhsk,hkd->bsd", mixed, layer["attention_out"])


def _attend(q, k, v):
    """Causal softmax attention over [batch, heads, seq, head_dim], softmax in float32.

    Divides after mixing and not before: [seq, head_dim] numbers and not [seq, seq].
    """
    seq = q.shape[2]
    scores = jnp.einsum("bhqk,bhsk->bhqs", q, k, preferred_element_type=jnp.float32)
    hidden = np.where(np.tri(seq, dtype=bool), 0.0, -1e30).astype(np.float32)
    scores = scores * q.shape[-1] ** -0.5 + hidden[None, None]
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    shares = jnp.exp(scores - top)
    mixed = jnp.einsum(
        "bhqs,bhsk->bhqk",
        shares.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    return (mixed / jnp.sum(shares, axis=-1, keepdims=True)).astype(v.dtype)


def _mlp(layer: dict, x: Float[Array, "batch seq dim"]):
    hidden = checkpoint_name(x @ layer["mlp_in"], "mlp_hidden")
    return _gelu(hidden) @ layer["mlp_out"]


@jax.custom_jvp
def _gelu(x):
    """GELU in its tanh form. Its own derivative keeps one array for the backward pass and
    not five, a third of a step on a CPU."""
    return x * jax.nn.sigmoid(_gelu_inner(x))


@_gelu.defjvp
def _gelu_jvp(primals, tangents):
    [x], [dx] = primals, tangents
    share = jax.nn.sigmoid(_gelu_inner(x))
    slope = _GELU * (1 + 3 * 0.044715 * x * x)
    return x * share, dx * (share + x * share * (1 - share) * slope)


_GELU = 2 * float(np.sqrt(2 / np.pi))


def _gelu_inner(x):
    # (1 + tanh(z)) / 2 is the sigmoid of 2 * z
    return _GELU * (x + 0.044715 * x * x * x)


def rotary_turns(n: int, head_dim: int) -> np.ndarray:
    """Cosines and sines of the angles of rotary positions.

    Args:
      n: number of places.
      head_dim: width of a head, even.

    Returns:
      float32 [2, n, head_dim / 2].

    Example:
      >>> rotary_turns(2, 4)[0, 0].tolist()
      [1.0, 1.0]
    """
    rates = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(n)[:, None] * rates
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def _rotate(x: Float[Array, "batch heads seq head_dim"], turns: np.ndarray):
    """Turns pairs of dims (i, i + head_dim / 2) by angles that grow with the place."""
    cos, sin = turns[:, None, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

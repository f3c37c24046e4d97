"""A GPT: a decoder-only transformer, to train on bytes or tokens.

Its blocks are stacked: each parameter of a block is one array with a leading dim of the
layers, under the path ``blocks/``. `shardjax.scan_layers` runs them, and the body asks for
the parameters of its layer by `shardjax.gather`, so the same model runs whole, in parts
(ZeRO stage 3) and, by `TP_RULES`, split over the mesh axis ``model``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from shardjax.models.transformer import (
    TP_RULES as TP_RULES,
    Blocks,
    apply_block,
    rms_norm,
    rotary_turns,
    stacked_params,
)
from shardjax.remat import Remat, scan_layers


class GPT(nnx.Module):
    """Pre-norm transformer blocks between one embedding, used at both ends.

    RMS norms (Zhang and Sennrich 2019), causal attention, GELU, no biases. The dtype of
    the parameters is that of the activations; norms, softmax and logits are float32.

    Attributes:
      vocab, dim, layers, heads, hidden: sizes.
      seq_len: longest sequence of learned positions; None with rotary ones.
      positions: "rotary" (Su et al., "RoFormer", 2021) or "learned".
      remat: what is kept for the backward pass, see `shardjax.remat`; those of
        `shardjax.models.transformer.NAMES` can be named.

    Example:
      >>> model = GPT(dim=16, layers=2, heads=2, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((3, 5), jnp.uint8)).shape
      (3, 5, 256)
    """

    def __init__(
        self,
        *,
        vocab: int = 256,
        dim: int,
        layers: int,
        heads: int,
        hidden: int | None = None,
        positions: str = "rotary",
        seq_len: int | None = None,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        """Makes the embedding, the blocks and the last norm.

        Args:
          vocab: number of different tokens; 256 for bytes.
          dim: width of the residual stream.
          layers: number of blocks.
          heads: attention heads of a block.
          hidden: hidden units of a block's MLP; None for ``4 * dim``.
          positions: how attention knows the order of tokens.
          seq_len: number of learned positions.
          remat: what is kept for the backward pass, see `shardjax.remat`.
          rngs: where the initial weights come from.

        Raises:
          ValueError: if a size is out of range, `heads` does not divide `dim`, or
            `positions`, `seq_len` or `remat` are not as above.
        """
        hidden = 4 * dim if hidden is None else hidden
        _check_sizes(vocab=vocab, dim=dim, layers=layers, heads=heads, hidden=hidden)
        _check_positions(positions, seq_len, dim // heads)
        Remat.parse(remat)
        self.vocab, self.dim, self.layers, self.heads = vocab, dim, layers, heads
        self.hidden, self.positions, self.seq_len = hidden, positions, seq_len
        self.remat = remat
        scale = 0.02
        self.embedding = nnx.Param(
            scale * jax.random.normal(rngs.params(), (vocab, dim))
        )
        if seq_len is not None:
            self.position = nnx.Param(
                scale * jax.random.normal(rngs.params(), (seq_len, dim))
            )
        self.blocks = Blocks(
            dim=dim, layers=layers, heads=heads, hidden=hidden, rngs=rngs
        )
        self.norm = nnx.Param(jnp.zeros(dim))

    def __call__(
        self, tokens: Integer[Array, "batch seq"]
    ) -> Float[Array, "batch seq vocab"]:
        """Gives the logits of each next token.

        Args:
          tokens: in [0, vocab). Others are not noticed here: their row is clamped.

        Returns:
          Logits, float32; those at place t depend on the tokens up to t.

        Raises:
          ValueError: for more tokens than there are learned positions.
        """
        embedding = self.embedding[...]
        x = embedding.at[tokens].get(mode="clip")
        turns = None
        if self.positions == "rotary":
            turns = rotary_turns(tokens.shape[1], self.dim // self.heads)
        else:
            x = x + self._learned(tokens.shape[1])[None]
        block = partial(apply_block, turns=turns)
        x = scan_layers(block, x, stacked_params(self.blocks), remat=self.remat)
        x = rms_norm(x, self.norm[...])
        return jnp.einsum(
            "bsd,vd->bsv", x, embedding, preferred_element_type=jnp.float32
        )

    def _learned(self, n: int) -> Float[Array, "seq dim"]:
        if n > (self.seq_len or 0):
            raise ValueError(
                f"a sequence must not be longer than the {self.seq_len} learned positions"
                f" of the GPT, got {n} tokens. Shorten it, or give a larger `seq_len` or"
                ' `positions="rotary"`.'
            )
        return self.position[:n]

    def parameter_count(self) -> int:
        """The number of parameters, by formula.

        Returns:
          ``vocab * dim + layers * (4 * dim**2 + 2 * dim * hidden + 2 * dim) + dim``, and
          ``seq_len * dim`` for learned positions.

        Example:
          >>> GPT(dim=16, layers=2, heads=2, rngs=nnx.Rngs(0)).parameter_count()
          10320
        """
        d = self.dim
        block = 4 * d * d + 2 * d * self.hidden + 2 * d
        return (self.vocab + (self.seq_len or 0) + 1) * d + self.layers * block

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a training step per token: matrix products, forward and backward.

        The backward pass counts twice the forward one. Attention counts in full, as it
        is computed here, not only below the diagonal; recomputation by `remat` is not
        counted, as is usual for the utilisation of a machine (MFU).

        Args:
          seq_len: tokens per sequence.

        Returns:
          ``6 * (layers * (4 * dim**2 + 2 * dim * hidden + 2 * seq_len * dim)
          + vocab * dim)``.

        Example:
          >>> GPT(dim=16, layers=2, heads=2, rngs=nnx.Rngs(0)).flops_per_token(8)
          64512
        """
        d = self.dim
        block = 4 * d * d + 2 * d * self.hidden + 2 * seq_len * d
        return 6 * (self.layers * block + self.vocab * d)


def next_token_loss(
    model: GPT,
    tokens: Integer[Array, "batch length"],
    weights: Float[Array, "batch seq"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross entropy of each token after the first of its sequence, in nats.

    Args:
      model: gives the logits.
      tokens: sequences of ``seq + 1`` tokens: all but the last are read, all but the
        first are predicted.
      weights: of the predicted tokens; 0 for those that do not count.

    Returns:
      The weighted sum over the tokens and the sum of the weights, both float32.

    Raises:
      ValueError: if the shapes of `tokens` and `weights` do not belong together.

    Example:
      >>> model = GPT(dim=16, layers=2, heads=2, rngs=nnx.Rngs(0))
      >>> tokens, weights = jnp.zeros((3, 6), jnp.uint8), jnp.ones((3, 5))
      >>> total, weight = next_token_loss(model, tokens, weights)
      >>> float(weight)
      15.0
    """
    batch, length = tokens.shape
    if weights.shape != (batch, length - 1):
        raise ValueError(
            f"`weights` must have one for each token after the first, shape"
            f" {(batch, length - 1)} for tokens {tokens.shape}, got {weights.shape}."
            " Give sequences of one token more than are predicted."
        )
    logits = model(tokens[:, :-1])
    targets = tokens[:, 1:, None].astype(jnp.int32)
    # a sum over a mask and no gather, whose gradient would be a scatter
    hit = targets == jnp.arange(logits.shape[-1])[None, None]
    picked = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    weights = weights.astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)


def tiny(*, rngs: nnx.Rngs, **changes) -> GPT:
    """2 layers of 64: 0.12 M parameters, for tests.

    Args:
      rngs: where the initial weights come from.
      **changes: arguments of `GPT` that replace those of the preset.

    Returns:
      The model.

    Example:
      >>> tiny(rngs=nnx.Rngs(0)).parameter_count()
      115008
    """
    return _preset(64, 2, 4, changes, rngs)


def small(*, rngs: nnx.Rngs, **changes) -> GPT:
    """4 layers of 128: 0.8 M parameters, for minutes on a CPU.

    Args:
      rngs, **changes: as of `tiny`.

    Returns:
      The model.

    Example:
      >>> small(rngs=nnx.Rngs(0)).parameter_count()
      820352
    """
    return _preset(128, 4, 4, changes, rngs)


def medium(*, rngs: nnx.Rngs, **changes) -> GPT:
    """8 layers of 512: 25 M parameters, for one accelerator.

    Args:
      rngs, **changes: as of `tiny`.

    Returns:
      The model.

    Example:
      >>> model = nnx.eval_shape(lambda: medium(rngs=nnx.Rngs(0)))
      >>> model.parameter_count()
      25305600
    """
    return _preset(512, 8, 8, changes, rngs)


def large(*, rngs: nnx.Rngs, **changes) -> GPT:
    """24 layers of 2048: 1.2 G parameters, for many accelerators.

    Args:
      rngs, **changes: as of `tiny`.

    Returns:
      The model.

    Example:
      >>> model = nnx.eval_shape(lambda: large(rngs=nnx.Rngs(0)))
      >>> model.parameter_count()
      1208584192
    """
    return _preset(2048, 24, 16, changes, rngs)


def _preset(dim: int, layers: int, heads: int, changes: dict, rngs: nnx.Rngs) -> GPT:
    sizes: dict[str, Any] = {"dim": dim, "layers": layers, "heads": heads}
    return GPT(**(sizes | changes), rngs=rngs)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(
                f"`{name}` of a GPT must be positive, got {value}. `tiny`, `small`, ..."
                " are sizes that belong together."
            )
    if sizes["dim"] % sizes["heads"]:
        raise ValueError(
            f"`heads` of a GPT must divide `dim`, got {sizes['heads']} heads for dim"
            f" {sizes['dim']}. Give a dim that is a multiple of the heads."
        )


def _check_positions(positions: str, seq_len: int | None, head_dim: int) -> None:
    if positions not in ("rotary", "learned"):
        raise ValueError(
            f'`positions` of a GPT must be "rotary" or "learned", got {positions!r}.'
        )
    if positions == "rotary" and head_dim % 2:
        raise ValueError(
            f"rotary positions turn pairs of dims: `dim // heads` must be even, got"
            f' {head_dim}. Give fewer heads, or `positions="learned"`.'
        )
    if positions == "rotary" and seq_len is not None:
        raise ValueError(
            f"`seq_len` of a GPT is the number of learned positions, got {seq_len} with"
            " rotary ones, which have no limit. Leave it out, or give"
            ' `positions="learned"`.'
        )
    if positions == "learned" and (seq_len is None or seq_len < 1):
        raise ValueError(
            "learned positions of a GPT need `seq_len`, the length of the longest"
            f" sequence, got {seq_len}. Give a positive number such as 256."
        )

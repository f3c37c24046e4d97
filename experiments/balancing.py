"""Parts of batches by the speed of the processes of a run."""

from typing import Any

import jax

from shardjax.data import BlockShare
from shardjax.probing import make_probe


class Balancer:
    """Measures this process every so many steps, for its share of the batches.

    Args:
      share: of the batches.
      config: of the program, with `precision`.
      network, collection, n_dense: as of `make_probe`.
    """

    def __init__(
        self, share: BlockShare, config: Any, network, collection, n_dense: int
    ):
        self.share = share
        self._blocks = 4
        self._probe = make_probe(
            network,
            collection,
            n_dense=n_dense,
            block_size=share.block_size,
            blocks=self._blocks,
            precision=config.precision,
        )

    def after(self, step: int, info: dict[str, Any]) -> None:
        """Measures, if it is time, once the devices have nothing to do."""
        if step % self.share.every == 0:
            jax.block_until_ready(info["loss"])
            self.share.observe(self._probe(), self._blocks)

    def figures(self) -> dict[str, float]:
        """Blocks of the fastest and the slowest process in the batch that was cut last."""
        counts = self.share.counts
        return {
            "balance/most_blocks": int(counts.max()),
            "balance/least_blocks": int(counts.min()),
        }

"""Batches of Zipf ids for benchmarks, numpy alone: other frameworks import it too."""

import numpy as np

FEATURES, DENSE, DIM = 26, 13, 16


def table_rows(total: int) -> int:
    """Rows of each of the equal tables that have `total` rows together."""
    return -(-total // FEATURES)


def batches(total_rows: int, batch: int, count: int, zipf: float = 1.1, seed: int = 3):
    """Distinct batches: dense [batch, 13], ids int64 [26, batch], labels [batch].

    Ids are Zipf over each table and scattered over it.
    """
    rng = np.random.default_rng(seed)
    rows, exponent = table_rows(total_rows), 1 - zipf
    out = []
    for _ in range(count):
        u = rng.random((FEATURES, batch)) * ((rows + 1.0) ** exponent - 1) + 1
        rank = np.minimum((u ** (1 / exponent)).astype(np.int64) - 1, rows - 1)
        ids = np.ascontiguousarray(rank * 2654435761 % rows)
        dense = rng.random((batch, DENSE), np.float32)
        out.append((dense, ids, (rng.random(batch) < 0.25).astype(np.float32)))
    return out

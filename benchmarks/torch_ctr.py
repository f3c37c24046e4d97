"""The PyTorch side of benchmarks/ctr.py; run by a Python that has torch, not jax.

    python benchmarks/torch_ctr.py --variant tbe --rows 5000000

tbe: FBGEMM's table-batched embeddings, row-wise Adagrad fused into the backward pass
(fbgemm-gpu-cpu). bag: one nn.EmbeddingBag(sparse=True) and torch.optim.Adagrad.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import zipf
from zipf import DENSE, DIM, FEATURES

LEFT, RIGHT = torch.triu_indices(FEATURES + 1, FEATURES + 1, 1)


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return layers


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(*mlp(DENSE, 64, DIM))
        self.top = nn.Sequential(*mlp(DIM + len(LEFT), 256, 128, 1)[:-1])

    def forward(self, dense, vectors):
        x = self.bottom(dense)
        v = torch.cat([x[:, None], vectors], 1)
        z = torch.bmm(v, v.transpose(1, 2))[:, LEFT, RIGHT]
        return self.top(torch.cat([x, z], 1))[:, 0]


class Tbe(nn.Module):
    def __init__(self, rows):
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        spec = (rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * FEATURES,
            pooling_mode=PoolingMode.SUM,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.05,
            eps=1e-10,
        )
        for w in self.tbe.split_embedding_weights():
            nn.init.uniform_(w, -0.01, 0.01)

    def forward(self, ids):
        n = ids.numel()
        out = self.tbe(ids.reshape(-1), torch.arange(n + 1))
        return out.view(ids.shape[1], FEATURES, DIM)


class Bag(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.bag = nn.EmbeddingBag(rows * FEATURES, DIM, mode="sum", sparse=True)
        nn.init.uniform_(self.bag.weight, -0.01, 0.01)
        self.base = torch.arange(FEATURES)[:, None] * rows

    def forward(self, ids):
        flat = (ids + self.base).t().reshape(-1)
        return self.bag(flat, torch.arange(len(flat))).view(-1, FEATURES, DIM)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=["tbe", "bag"], required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=20)
    a = parser.parse_args()
    torch.manual_seed(0)
    head = Head()
    embeddings = {"tbe": Tbe, "bag": Bag}[a.variant](zipf.table_rows(a.rows))
    optimizers = [torch.optim.Adam(head.parameters(), 1e-3)]
    if a.variant == "bag":
        optimizers.append(torch.optim.Adagrad(embeddings.parameters(), 0.05, eps=1e-10))
    loss = nn.BCEWithLogitsLoss()
    data = zipf.batches(a.rows, a.batch, 16)
    times = []
    for i in range(a.warm + a.steps):
        if i == a.warm:
            cpu = time.process_time()
        start = time.perf_counter()
        dense, ids, labels = (torch.from_numpy(x) for x in data[i % len(data)])
        for o in optimizers:
            o.zero_grad()
        loss(head(dense, embeddings(ids)), labels).backward()
        for o in optimizers:
            o.step()
        times.append(time.perf_counter() - start)
    times = np.array(times[a.warm :])
    result = {
        "variant": a.variant,
        "rows": a.rows,
        "examples_per_s": a.batch / times.mean(),
        "step_ms": float(np.median(times) * 1e3),
        "cpu_ms": (time.process_time() - cpu) / a.steps * 1e3,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""What the target of a large embedding table costs a step, and what copying it whole does.

    python benchmarks/table_target.py --rows 1000000 --dim 32 --keys 4096

Steps of Q-learning over one table with Adam, all variants in one process, a few steps of each
in turn:

none        the network says itself what comes next: no target is kept or read
write       keep_target(HardCopy(100)): a row saves its value at its first update after a copy
polyak      keep_target(Polyak(0.005))
copy        keep_target(HardCopy(100), mode="copy"): the whole table, every 100th step
copy 10     the same, every 10th

Prints a table: medians per step, the step in which a whole copy is due, and bytes per row; as
the last line JSON. Keys are uniform, the worst case: each is touched about once per copy.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))

NAMES = ("state", "action", "following", "next_action")


class NoTarget:
    """The objective of Q-learning by the network's own values; nothing lags."""

    target = None

    def __init__(self, of):
        self._of = of

    def __call__(self, outputs, lagged, labels, dense):
        """See `shardjax.train.Objective`."""
        return self._of(outputs, outputs, labels, dense)


def make_variants():
    """Rules and modes by name; None keeps no target."""
    from shardjax import rl

    return {
        "none": None,
        "write": (rl.HardCopy(100), "write"),
        "polyak": (rl.Polyak(0.005), "write"),
        "copy": (rl.HardCopy(100), "copy"),
        "copy 10": (rl.HardCopy(10), "copy"),
    }


class Variant:
    """Training with one kind of target."""

    def __init__(self, kind, rows, dim, keys):
        import shardjax as sj
        from shardjax import rl

        tx = optax.adam(1e-3)
        objective = NoTarget(rl.QLearning())
        rule = None
        if kind is not None:
            rule, mode = kind
            tx, objective = rl.keep_target(tx, rule, mode), rl.QLearning(rule)
        table = sj.embed.TableSpec("item", dim, tx)
        self.collection = sj.embed.EmbeddingCollection(
            {name: sj.embed.FeatureSpec(table) for name in NAMES},
            mesh=sj.make_mesh("1x1"),
            initial_rows=rows,
        )

        def apply(params, state, dense, embeddings, *, train):
            state_tm1, a_tm1, state_t, a_t = (embeddings[name] for name in NAMES)
            q_t = jnp.sum(state_t * a_t, axis=-1, keepdims=True) + params["bias"]
            return rl.QValues(jnp.sum(state_tm1 * a_tm1, axis=-1), q_t), state

        network = sj.Network(apply, {"bias": np.zeros((), np.float32)}, {})
        dense_tx = optax.sgd(0.1)
        self.state = sj.init_state(network, dense_tx, self.collection, target=rule)
        values = np.zeros((rows, dim), np.float32)
        tables = self.collection.load_rows(
            self.state.tables, "item", np.arange(rows), values
        )
        self.state = self.state.replace(tables=tables)
        self.step = sj.make_train_step(
            network, dense_tx, self.collection, objective=objective
        )
        self.rng, self.rows = np.random.default_rng(0), rows
        self.shape, self.taken = (len(NAMES), keys // len(NAMES)), 0
        [slab] = self.state.tables
        per_row = [slab.rows, *slab.row_state]
        self.row_bytes = sum(x.nbytes for x in per_row) // slab.rows.shape[0]

    def run(self, steps):
        """Milliseconds of each of some steps, without planning."""
        from shardjax import train
        from shardjax.data import Batch

        times = []
        for _ in range(steps):
            ids = self.rng.integers(0, self.rows, self.shape).astype(np.uint64)
            size = self.shape[1]
            batch = Batch(np.ones(size), np.ones((size, 1)), ids, NAMES)
            batch = train.prepare(self.collection, batch, train=True)
            jax.block_until_ready(batch.packed)
            start = time.perf_counter()
            self.state, info = self.step(self.state, batch)
            jax.block_until_ready((self.state, info))
            times.append((self.taken, 1e3 * (time.perf_counter() - start)))
            self.taken += 1
        return times


def main():
    """Runs the variants in turns and prints what they took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--keys", type=int, default=4096, help="per step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="in a row, of a variant")
    arguments = parser.parse_args()
    kinds = make_variants()
    variants = {
        name: Variant(kind, arguments.rows, arguments.dim, arguments.keys)
        for name, kind in kinds.items()
    }
    times = {name: [] for name in variants}
    for round_ in range(arguments.rounds + 1):
        for name, variant in variants.items():
            found = variant.run(arguments.steps)
            if round_:  # the first compiles
                times[name] += found
    result = {}
    print("| target | ms per step | of them when a copy is due | bytes per row |")
    print("|---|---|---|---|")
    for name, kind in kinds.items():
        every = kind[0].every if kind and kind[1] == "copy" else None
        due = [t for n, t in times[name] if every and n % every == 0]
        usual = [t for n, t in times[name] if not every or n % every]
        row = {
            "step_ms": round(statistics.median(usual), 3),
            "copy_ms": round(statistics.median(due), 3) if due else None,
            "row_bytes": variants[name].row_bytes,
        }
        result[name] = row
        print(
            f"| {name} | {row['step_ms']:.2f} | {row['copy_ms'] or ''} |"
            f" {row['row_bytes']} |"
        )
    print(json.dumps({**vars(arguments), "variants": result}))


if __name__ == "__main__":
    main()

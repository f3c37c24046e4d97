"""What a target network costs a step in which nothing is due, and otherwise.

    python benchmarks/target.py

A step over 64 MB of parameters (elementwise, so that little hides the target), parameters
and target donated. Beside `apply_target` with a hard copy that is not due: a step that only
hands the target on, the same by `optax.periodic_update` and by `jnp.where`, and what is done
when it is due: a copy, and the average of `Polyak`. The variants take turns, a few steps each,
in another order each round. Prints medians and ranges of the rounds and, last, JSON.
"""

import argparse
import json
import random
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from shardjax import rl

NEVER = 2**30


def where(params, target, step):
    return jax.tree.map(lambda p, t: jnp.where(step % NEVER == 0, p, t), params, target)


def periodic(params, target, step):
    return optax.periodic_update(params, target, step, NEVER)


VARIANTS = {
    "no target step": lambda params, target, step: target,
    "HardCopy, not due": partial(rl.apply_target, rl.HardCopy(NEVER)),
    "optax.periodic_update, not due": periodic,
    "jnp.where, not due": where,
    "HardCopy, due each step": partial(rl.apply_target, rl.HardCopy(1)),
    "Polyak": partial(rl.apply_target, rl.Polyak(0.005)),
}


class Variant:
    """A compiled step and its state."""

    def __init__(self, apply, megabytes):
        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params, target, number):
            params = jax.tree.map(lambda p: p - 1e-3 * p, params)
            return params, apply(params, target, number)

        rows = megabytes * 2**20 // 4 // 1024
        params = {"w": jnp.ones((rows, 1024))}
        self.state = params, rl.init_target(params, rl.HardCopy(1))
        self._step, self._number = step, 1
        self.turn(2)

    def turn(self, steps):
        """Milliseconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state = self._step(*self.state, self._number)
            self._number += 1
        jax.block_until_ready(self.state)
        return 1e3 * (time.perf_counter() - start) / steps


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    a = parser.parse_args()
    variants = {name: Variant(apply, a.megabytes) for name, apply in VARIANTS.items()}
    times, order = {name: [] for name in variants}, random.Random(0)
    for _ in range(a.rounds):
        for name in order.sample(list(variants), len(variants)):
            times[name].append(variants[name].turn(a.steps))
    base = np.array(times["no target step"])
    result = {"benchmark": "target", **vars(a), "platform": jax.default_backend()}
    print(
        "variant | ms per step, median (quarter-three quarters) | more than no target"
    )
    for name, found in times.items():
        low, middle, high = np.percentile(found, (25, 50, 75))
        more = float(np.median(np.array(found) - base))  # within a round
        print(f"{name} | {middle:.2f} ({low:.2f}-{high:.2f}) | {more:+.2f} ms")
        result[f"{name} ms"] = round(float(middle), 3)
        result[f"{name} more_ms"] = round(more, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

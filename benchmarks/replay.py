"""Prioritized replays beside each other: draw, weights, gather, and priorities back.

    python benchmarks/replay.py                          # as in results/
    python benchmarks/replay.py --platform cuda --without host cpprb

One iteration draws a batch of transitions as of CartPole (5 fields, 44 bytes), with
importance weights, and sets new priorities. All replays are full, with lognormal priorities
and alpha 0.6, and have their turn in each round, in another order, so that the load of the
machine hits all alike. What counts is the least CPU time of the process over the rounds,
which a loaded machine changes little; a round is shorter than the turn of the scheduler.

cpprb and flashbax take part if they are installed. cpprb keeps a tree of minima as well.
flashbax gives probabilities, of which weights are made here in numpy. Prints a table and,
as the last line, JSON.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent)]

ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
EXAMPLE = {
    "obs_tm1": np.zeros(4, np.float32),
    "a_tm1": np.int32(0),
    "r_t": np.float32(0),
    "discount_t": np.float32(0),
    "obs_t": np.zeros(4, np.float32),
}
CHUNK = 10_000


def chunk(rng, n):
    """So many items and their priorities."""
    items = {
        k: rng.integers(0, 100, (n, *np.shape(x))).astype(x.dtype)
        for k, x in EXAMPLE.items()
    }
    return items, rng.lognormal(0, 1, n)


def host(capacity, batch, pool):
    """`rl.Replay`."""
    from shardjax import rl

    replay, rng = rl.Replay(EXAMPLE, capacity, rl.Proportional(ALPHA)), rng_of(capacity)
    for _ in range(0, capacity, CHUNK):
        replay.add(*chunk(rng, CHUNK))

    def iteration(i):
        drawn = replay.sample(batch, beta=BETA)
        replay.set_priorities(drawn.ids, pool[i])

    return iteration


def device(capacity, batch, pool):
    """`rl.DeviceReplay`, a program to draw and one to set priorities, state donated."""
    import jax

    from shardjax import rl

    replay, rng = rl.DeviceReplay(capacity, rl.Proportional(ALPHA)), rng_of(capacity)
    add = jax.jit(replay.add, donate_argnums=0)
    sample = jax.jit(lambda s, k: replay.sample(s, k, batch, beta=BETA))
    set_priorities = jax.jit(replay.set_priorities, donate_argnums=0)
    state = replay.init(EXAMPLE)
    for _ in range(0, capacity, CHUNK):
        items, priorities = chunk(rng, CHUNK)
        state, _ = add(state, items, priorities.astype(np.float32))
    keys, pool = jax.random.split(jax.random.key(0), len(pool)), jax.device_put(pool)
    keys, pool = list(keys), [x.astype(np.float32) for x in pool]

    def iteration(i):
        nonlocal state
        drawn = sample(state, keys[i])
        state, _ = set_priorities(state, drawn.ids, pool[i])
        jax.block_until_ready((state, drawn))

    return iteration


def cpprb(capacity, batch, pool):
    """cpprb's PrioritizedReplayBuffer, in C++."""
    from cpprb import PrioritizedReplayBuffer

    fields = {k: {"shape": x.shape or 1, "dtype": x.dtype} for k, x in EXAMPLE.items()}
    replay = PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA, eps=EPS)
    rng = rng_of(capacity)
    for _ in range(0, capacity, CHUNK):
        items, priorities = chunk(rng, CHUNK)
        replay.add(**items, priorities=priorities)

    def iteration(i):
        drawn = replay.sample(batch, beta=BETA)
        replay.update_priorities(drawn["indexes"], pool[i])

    return iteration


def flashbax(capacity, batch, pool):
    """flashbax' item buffer, a program to draw and one to set priorities."""
    import jax
    import jax.numpy as jnp
    from flashbax import make_prioritised_item_buffer

    replay = make_prioritised_item_buffer(
        max_length=capacity,
        min_length=1,
        sample_batch_size=batch,
        add_sequences=True,
        add_batches=False,
        priority_exponent=ALPHA,
        device=jax.default_backend(),
    )
    add = jax.jit(replay.add, donate_argnums=0)
    sample = jax.jit(replay.sample)
    set_priorities = jax.jit(replay.set_priorities, donate_argnums=0)
    state, rng = replay.init(jax.tree.map(jnp.asarray, EXAMPLE)), rng_of(capacity)
    everywhere = jnp.arange(CHUNK)
    for start in range(0, capacity, CHUNK):
        items, priorities = chunk(rng, CHUNK)
        state = add(state, items)
        state = set_priorities(
            state, start + everywhere, jnp.asarray(priorities, jnp.float32)
        )
    keys = list(jax.random.split(jax.random.key(0), len(pool)))
    pool = [jnp.asarray(x, jnp.float32) for x in pool]

    def iteration(i):
        nonlocal state
        drawn = sample(state, keys[i])
        weights = (capacity * np.asarray(drawn.probabilities)) ** -BETA
        weights /= weights.max()
        state = set_priorities(state, drawn.indices, pool[i])
        jax.block_until_ready((state, drawn))

    return iteration


def rng_of(seed):
    return np.random.default_rng(seed)


REPLAYS = {"host": host, "device": device, "cpprb": cpprb, "flashbax": flashbax}


def made(names, cases, pool):
    """Iterations by (name, capacity, batch), of the replays that are installed."""
    iterations = {}
    for name in names:
        for capacity, batch in cases:
            try:
                of_batch = [x[:batch] for x in pool]
                iterations[name, capacity, batch] = REPLAYS[name](
                    capacity, batch, of_batch
                )
            except ModuleNotFoundError as error:
                print(f"without {name}: {error}", file=sys.stderr)
    return iterations


def take_turns(iterations, rounds, each, pool):
    """Seconds of an iteration, (CPU, wall) [rounds], by what is in `iterations`."""
    for iteration in iterations.values():
        for i in range(3):
            iteration(i)
    spent, order = {case: [] for case in iterations}, random.Random(0)
    for _ in range(rounds):
        for case in order.sample(list(iterations), len(iterations)):
            start, cpu = time.perf_counter(), time.process_time()
            for i in range(each):
                iterations[case](i % pool)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - start
            spent[case].append((cpu / each, wall / each))
    return {case: np.array(x) for case, x in spent.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capacities", type=int, nargs="+", default=[10_000, 1_000_000]
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--each", type=int, default=20, help="iterations of a turn")
    parser.add_argument("--without", nargs="*", default=[], choices=REPLAYS)
    parser.add_argument("--platform", default="cpu")
    a = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", a.platform)
    pool = rng_of(1).lognormal(0, 1, (64, max(a.batches)))
    cases = [(c, b) for c in a.capacities for b in a.batches]
    names = [name for name in REPLAYS if name not in a.without]
    iterations = made(names, cases, pool)
    spent = take_turns(iterations, a.rounds, a.each, len(pool))
    result = {"benchmark": "replay", "platform": a.platform}
    print(
        "replay | capacity | batch | us of CPU, least (median) | us of wall | of host"
    )
    for (name, capacity, batch), x in spent.items():
        cpu, wall = (1e6 * x).min(axis=0)
        middle = 1e6 * np.median(x[:, 0])
        case = f"{name} {capacity} {batch}"
        result[case] = round(cpu, 1)
        of_host = spent.get(("host", capacity, batch))
        ratio = ""
        if of_host is not None:
            ratio = f"{1e6 * of_host[:, 0].min() / cpu:.2f}x"
        print(
            f"{name} | {capacity:,} | {batch} | {cpu:.0f} ({middle:.0f}) | {wall:.0f} |"
            f" {ratio}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()

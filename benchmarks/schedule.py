"""Time of data parallel training with stragglers, by how minibatches are split.

    python benchmarks/schedule.py

A simulation: each process has a time per block in each minibatch, a minibatch is over when
the last process is, and the next one begins then. Beside ours: equal parts; parts by the
inverse of the times that the last minibatch took; and as the unit the offline optimum, which
knows the time of each block beforehand. "Knows the start" has the exact times of the first
blocks, about the most that a split which is made before a minibatch can know. "Handed out" is
`Handout`: a process asks for each block, which takes it `--ask` of the time of a block.

Every process has its own speed (x 1 to 1.5) and jitters (`--jitter`). Stragglers, by 2 to 8
times: permanent ones, one process of 8; bursts, each process for 10 % of the time, for 20
minibatches on average; random ones, each process in 5 % of the minibatches; a mix, of half of
each. Bursts and random ones begin anywhere in a minibatch, also with its last block; nobody
can foresee them. Prints medians and worst of the seeds and, last, JSON.
"""

import argparse
import heapq
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from handout import Handout

from shardjax.data.blocks import assign
from shardjax.data.schedule import BlockSchedule

PATTERNS = ("none", "permanent", "bursts", "random", "mix")
BURST = 20  # minibatches


@dataclass
class Times:
    """Seconds per block of each process in one minibatch.

    Attributes:
      before: of its first blocks, [processes].
      after: of the others.
      change: how many are the first.
    """

    before: np.ndarray
    after: np.ndarray
    change: np.ndarray

    def finish(self, counts) -> np.ndarray:
        """When each process has finished so many blocks."""
        early = np.minimum(counts, self.change)
        return early * self.before + (counts - early) * self.after


def minibatch_times(pattern, processes, blocks, minibatches, jitter, rng):
    """Times of each minibatch."""
    own = np.exp(rng.uniform(0, np.log(1.5), processes))
    half = 0.5 if pattern == "mix" else 1.0
    permanent = np.zeros(processes, bool)
    if pattern in ("permanent", "mix"):
        permanent = rng.permutation(processes) < max(1, half * processes / 8)
    own *= np.where(permanent, _factor(rng, processes), 1)
    part = 0.1 * half if pattern in ("bursts", "mix") else 0
    begin = part / (1 - part) / BURST  # so often, to be slow for this part of the time
    burst = np.where(rng.random(processes) < part, _factor(rng, processes), 1)
    for _ in range(minibatches):
        base = own * np.exp(rng.normal(0, jitter, processes))
        before = base * burst
        ends = (burst > 1) & (rng.random(processes) < 1 / BURST)
        begins = (burst == 1) & (rng.random(processes) < begin)
        burst = np.where(begins, _factor(rng, processes), np.where(ends, 1, burst))
        after = base * burst
        if pattern in ("random", "mix"):
            hit = rng.random(processes) < 0.05 * half
            after *= np.where(hit, _factor(rng, processes), 1)
        yield Times(before, after, rng.integers(0, blocks, processes))


def _factor(rng, processes):
    return np.exp(rng.uniform(np.log(2), np.log(8), processes))


def optimum(stream, blocks, a):
    """The best split of each minibatch, known beforehand: the first `blocks` to finish."""
    total, numbers = 0.0, np.arange(1, blocks + 1)[:, None]
    for times in stream:
        ends = times.finish(numbers).ravel()
        total += float(np.partition(ends, blocks - 1)[blocks - 1])
    return total


def equal(stream, blocks, a):
    """As many blocks for all."""
    return sum(
        float(times.finish(blocks // len(times.before)).max()) for times in stream
    )


def inverse(stream, blocks, a):
    """In proportion to the speed in the minibatch before, one at least."""
    total, speeds = 0.0, np.ones(len(stream[0].before))
    for times in stream:
        exact = (blocks - len(speeds)) * speeds / speeds.sum()
        counts = 1 + np.floor(exact).astype(int)
        counts[np.argsort(np.floor(exact) - exact)[: blocks - counts.sum()]] += 1
        busy = times.finish(counts)
        total += float(busy.max())
        speeds = counts / busy
    return total


def ours(stream, blocks, a):
    """A split before each minibatch, by a `BlockSchedule`."""
    total, schedule = 0.0, BlockSchedule(len(stream[0].before))
    for times in stream:
        counts = schedule.next(blocks)
        busy = times.finish(counts)
        end = busy.max()
        total += float(end)
        schedule.observe(np.full(len(busy), end), counts, waited=end - busy)
    return total


def knows_start(stream, blocks, a):
    """A split before each minibatch, by the exact times at its start."""
    return sum(float(t.finish(assign(blocks, t.before)).max()) for t in stream)


def handed_out(stream, blocks, a):
    """Block by block, by a `Handout`."""
    total, schedule = 0.0, BlockSchedule(len(stream[0].before))
    for times in stream:
        handout, end = Handout(schedule, blocks), 0.0
        before, after, change = (x.tolist() for x in vars(times).values())
        busy, ask = np.zeros(len(before)), a.ask * float(np.median(times.before))
        # at the start all ask at once: in the order in which they are expected to be fast
        order = np.argsort(schedule.expected()).tolist()
        waiting = [(0.0, n, p) for n, p in enumerate(order)]
        while waiting:
            now, place, p = waiting[0]
            if handout.take(p, now):
                now += ask + (before if handout.counts[p] <= change[p] else after)[p]
                heapq.heapreplace(waiting, (now, place, p))
            else:
                busy[p], end = now, max(end, now)
                heapq.heappop(waiting)
        total += end
        schedule.observe(busy, handout.counts)
    return total


VARIANTS = {
    "equal": equal,
    "inverse speed": inverse,
    "ours": ours,
    "knows the start": knows_start,
    "ours, handed out": handed_out,
}


def draw(path, names, found):
    """Bars of the medians, and lines up to the worst."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 * len(names), 4), layout="constrained")
    axis, width = figure.subplots(), 0.8 / len(VARIANTS)
    for number, variant in enumerate(VARIANTS):
        middle = np.array([np.median(found[n][variant]) for n in names])
        worst = np.array([max(found[n][variant]) for n in names]) - middle
        at = np.arange(len(names)) + number * width
        axis.bar(at, middle, width, yerr=[worst * 0, worst], label=variant)
    axis.axhline(1.1, color="black", linewidth=0.8)
    axis.set(
        title="Time over that of the offline optimum", yscale="log", ylim=(0.99, 12)
    )
    axis.set_yticks(
        [1, 1.1, 1.5, 2, 3, 5, 10], ["1", "1.1", "1.5", "2", "3", "5", "10"]
    )
    axis.minorticks_off()
    axis.set_xticks(
        np.arange(len(names)) + 0.3, ["\n".join(map(str, n)) for n in names]
    )
    axis.legend()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument(
        "--blocks", type=int, default=16, help="per process, on average"
    )
    parser.add_argument("--minibatches", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jitter", type=float, default=0.02)
    parser.add_argument("--ask", type=float, default=0.02)
    parser.add_argument("--plot", help="a PNG to draw the result into")
    a = parser.parse_args()
    begin, found = time.perf_counter(), {}
    for pattern in PATTERNS:
        for processes in a.processes:
            ratios = found[pattern, processes] = {name: [] for name in VARIANTS}
            for seed in range(a.first_seed, a.first_seed + a.seeds):
                rng = np.random.default_rng([seed, processes, PATTERNS.index(pattern)])
                stream = list(
                    minibatch_times(
                        pattern, processes, a.blocks, a.minibatches, a.jitter, rng
                    )
                )
                blocks = a.blocks * processes
                best = optimum(stream, blocks, a)
                for name, variant in VARIANTS.items():
                    ratios[name].append(variant(stream, blocks, a) / best)
    print(f"{a.blocks} blocks per process and minibatch, {a.minibatches} minibatches")
    print(f"{a.seeds} seeds; time over the offline optimum's, median (worst)")
    print(" | ".join(["stragglers | processes", *VARIANTS]))
    result = {"benchmark": "schedule", **vars(a)}
    for (pattern, processes), ratios in found.items():
        cells = [f"{np.median(r):.3f} ({max(r):.3f})" for r in ratios.values()]
        print(" | ".join([pattern, str(processes), *cells]))
        for name, r in ratios.items():
            result[f"{pattern} {processes} {name}"] = round(float(np.median(r)), 4)
    result["seconds"] = round(time.perf_counter() - begin, 1)
    if a.plot:
        draw(a.plot, list(found), found)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

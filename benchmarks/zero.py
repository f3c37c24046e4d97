"""A dense training step split by ZeRO, beside plain data parallelism, on the same devices.

    python benchmarks/zero.py

The language model of `experiments.lm` on 8 simulated devices, Adam, random tokens. Variants,
each compiled once, whose steps the rounds interleave:

plain      `jax.jit` of a value_and_grad with replicated parameters and a split batch
stage 0-3  `shardjax.zero.make_step`
M=4        stages 1 and 2 with four microbatches, beside plain with a scan of four
remat      stage 0 with full, dots and sqrt
hand       one device: a hand-written jitted loop, beside stage 0 on one device

Prints a table of medians, ratios to the baseline (above 1 is faster; of time, and of CPU
time, which other work on the machine disturbs less) and the temporaries of a device, and as
the last line JSON.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path[:0] = [str(Path(__file__).parent.parent)]
import shardjax as sj  # noqa: E402
from shardjax import profiling, zero  # noqa: E402
from shardjax.models import gpt  # noqa: E402

SEQUENCE = 64


def make_model(remat: str = "none") -> gpt.GPT:
    """The model, small enough for eight devices on two cores."""
    return gpt.GPT(dim=128, layers=4, heads=4, remat=remat, rngs=nnx.Rngs(0))


def make_loss(remat: str = "none"):
    """Parameters, and the loss of the model as the sum over tokens and their number."""
    graph, params = nnx.split(make_model(remat), nnx.Param)

    def loss(params, batch):
        model = nnx.merge(graph, params)
        return gpt.next_token_loss(model, batch["tokens"], batch["weights"])

    return params, loss


def make_plain(mesh, tx, microbatches: int = 1):
    """Data parallelism as commonly written: everything on every device."""
    params, loss = make_loss()
    everywhere = jax.NamedSharding(mesh, jax.P())

    def mean(params, batch):
        total, weight = loss(params, batch)
        return total / weight

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        if microbatches == 1:
            value, grads = jax.value_and_grad(mean)(params, batch)
        else:
            value, grads = accumulate(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    def accumulate(params, batch):
        def body(carry, part):
            found = jax.value_and_grad(mean)(params, part)
            return jax.tree.map(jnp.add, carry, found), None

        parts = jax.tree.map(
            lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch
        )
        start = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(body, start, parts)
        return jax.tree.map(lambda x: x / microbatches, total)

    params = jax.tree.map(lambda x: jax.device_put(jnp.copy(x), everywhere), params)
    state = (params, jax.jit(tx.init, out_shardings=everywhere)(params))
    return step, state


def make_zero(mesh, tx, stage: int, microbatches: int = 1, remat: str = "none"):
    """The step of a stage, and its state."""
    params, loss = make_loss(remat)
    plan = zero.plan_zero(params, tx, mesh, stage, blocks=("^blocks/",))
    step = zero.make_step(loss, tx, plan, microbatches=microbatches)
    return step, zero.init_state(params, tx, plan)


def make_batch(mesh, examples: int):
    """Random tokens on the devices."""
    random = np.random.default_rng(0)
    batch = {
        "tokens": random.integers(0, 256, (examples, SEQUENCE + 1)).astype(np.int32),
        "weights": np.ones((examples, SEQUENCE), np.float32),
    }
    return jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))


class Variant:
    """A compiled step with its state and the times that its steps took."""

    def __init__(self, step, state, batch):
        jitted: Any = getattr(step, "jitted", step)
        compiled = jitted.lower(state, batch).compile()
        self.step, self.state, self.batch = step, state, batch
        self.temporaries = profiling.memory(compiled).temporaries
        self.times: list[float] = []
        self.cpu: list[float] = []

    def run(self, steps: int) -> None:
        """Some steps, of which the mean counts."""
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state, info = self.step(self.state, self.batch)
            jax.block_until_ready(info)
        self.times.append((time.perf_counter() - started) / steps)
        self.cpu.append((time.process_time() - cpu) / steps)


def variants(examples: int) -> dict[str, Variant]:
    """All of them, compiled."""
    tx = optax.adamw(1e-3)
    eight, one = sj.make_mesh("8x1"), sj.make_mesh("1x1")
    batch, alone = make_batch(eight, examples), make_batch(one, examples)
    found = {"plain": Variant(*make_plain(eight, tx), batch)}
    for stage in zero.STAGES:
        found[f"stage {stage}"] = Variant(*make_zero(eight, tx, stage), batch)
    found["plain M=4"] = Variant(*make_plain(eight, tx, 4), batch)
    for stage in (1, 2, 3):
        found[f"stage {stage} M=4"] = Variant(*make_zero(eight, tx, stage, 4), batch)
    for remat in ("full", "dots", "sqrt"):
        found[f"stage 0 {remat}"] = Variant(
            *make_zero(eight, tx, 0, remat=remat), batch
        )
    found["hand, one device"] = Variant(*make_plain(one, tx), alone)
    found["stage 0, one device"] = Variant(*make_zero(one, tx, 0), alone)
    return found


def baseline(name: str) -> str:
    """What a variant is compared with."""
    if name.endswith("one device"):
        return "hand, one device"
    return "plain M=4" if name.endswith("M=4") else "plain"


def of_baseline(base: list[float], found: list[float]) -> float:
    """The median over rounds of the baseline's time over a variant's."""
    return statistics.median(b / f for b, f in zip(base[1:], found[1:], strict=True))


def main() -> None:
    """Runs the rounds and prints what they took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--examples", type=int, default=64, help="sequences per step")
    options = parser.parse_args()
    sj.simulate_cpu_devices(8)
    found = variants(options.examples)
    for number in range(options.rounds + 1):
        for variant in found.values():
            variant.run(options.steps if number else 1)
    tokens = options.examples * SEQUENCE
    result: dict[str, object] = {"benchmark": "zero", "tokens_per_step": tokens}
    print(
        "variant | ms per step, median (min-max) | of the CPU | speed | CPU | temporaries"
    )
    for name, variant in found.items():
        base = found[baseline(name)]
        speed = of_baseline(base.times, variant.times)
        cpu = of_baseline(base.cpu, variant.cpu)
        times = [1e3 * t for t in variant.times[1:]]
        middle, used = (
            statistics.median(times),
            1e3 * statistics.median(variant.cpu[1:]),
        )
        print(
            f"{name} | {middle:.1f} ({min(times):.1f}-{max(times):.1f}) | {used:.1f}"
            f" | {speed:.3f}x | {cpu:.3f}x | {variant.temporaries / 1e6:.1f} MB"
        )
        result |= {f"{name}, ms": round(middle, 2), f"{name}, CPU ms": round(used, 2)}
        result |= {f"{name}, speed": round(speed, 3), f"{name}, CPU": round(cpu, 3)}
        result[f"{name}, temporaries"] = variant.temporaries
    print(json.dumps(result))


if __name__ == "__main__":
    main()

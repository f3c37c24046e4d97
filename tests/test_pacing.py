"""The host runs two steps ahead of the devices, not more."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardjax import pacing
from shardjax.pacing import Pace

ROOT = Path(__file__).parent.parent


class Result:
    """An array of a step that notes who waits for it."""

    def __init__(self, name, waited):
        self.name, self.waited, self.done = name, waited, False

    def is_ready(self):
        return self.done

    def block_until_ready(self):
        self.waited.append(self.name)
        return self


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_oldest_step_is_waited_for(limit):
    waited = []
    pace = Pace(limit)
    for name in range(8):
        pace.wait()
        assert pace.under_way < limit
        assert waited == list(range(max(name - limit + 1, 0)))
        pace.add(Result(name, waited))
    assert pace.under_way == limit


def test_idle_time_counts_from_the_look_that_finds_no_step_under_way(monkeypatch):
    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    pace, steps = Pace(), [Result(i, []) for i in range(3)]
    pace.look()  # no step yet: the devices wait for nothing
    clock.now += 1
    for step in steps[:2]:
        pace.wait()
        pace.add(step)
    steps[0].done = True
    pace.look()  # the other one is under way
    clock.now += 1
    steps[1].done = True
    clock.now += 1
    pace.look()
    clock.now += 0.5
    pace.look()
    clock.now += 0.25
    assert pace.idle_seconds == 0
    pace.wait()
    assert pace.idle_seconds == 0.75
    clock.now += 1  # dispatching the step
    pace.add(steps[2])
    pace.look()
    clock.now += 1
    pace.wait()
    assert pace.idle_seconds == 0.75


PROGRAM = """
import jax, numpy as np, optax
import shardjax as sj
from shardjax import data, embed, metrics, train
from shardjax.state import init_state, stack_metrics
sj.ensure_devices("2x1")
mesh = sj.make_mesh("2x1")
features = {n: embed.FeatureSpec(embed.TableSpec(n, 16)) for n in "abcdefgh"}
collection = embed.EmbeddingCollection(features, mesh=mesh)
network = sj.Network(
    lambda p, s, dense, e, train: (sum(e.values()).sum(1) * p, s), np.float32(1.0), {}
)
rng = np.random.default_rng(0)
batches = [
    data.Batch(
        rng.integers(0, 2, 4096).astype("f4"), np.zeros((4096, 0), "f4"),
        rng.integers(0, 3000, (8, 4096)).astype("u8"), tuple("abcdefgh"),
    )
    for _ in range(4)
]
state = init_state(network, optax.sgd(0.1), collection)
step = train.make_train_step(network, optax.sgd(0.1), collection)
evaluate = train.make_eval_step(network, collection)
for b in batches:
    state, _ = step(state, train.prepare(collection, b, train=True))
prepared = [train.prepare(collection, b, train=False) for b in batches]
found = stack_metrics({"loss": metrics.LogLoss()}, mesh)
for i in range(400):
    found, _ = evaluate(state, found, prepared[i % 4])
print(sj.compute_metrics(found)["loss"])
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_many_steps_on_as_many_devices_as_cores_do_not_stop():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "NPROC": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < float(done.stdout) < 1


def test_inside_of_a_jit_there_is_nothing_to_wait_for():
    pace = Pace()

    @jax.jit
    def thrice(x):
        for _ in range(3):
            pace.wait()
            pace.add(x)
        return x

    assert float(thrice(1.0)) == 1.0
    assert pace.under_way == 0

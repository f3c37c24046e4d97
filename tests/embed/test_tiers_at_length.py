"""Long runs, most of whose rows are in RAM and on disk: the same bits as on the devices.

200 steps; the devices hold 5 % of the rows that are touched, RAM 20 %, the disk the rest. With
delays in every tier, segments merged all the time, and evaluation in between.

A usual run has 12 of the combinations of mesh, optimizer and look-ahead, which have each pair.
All 36:

    python -m pytest tests/embed/test_tiers_at_length.py --all-combinations
"""

import functools
import itertools
import random
import time

import numpy as np
import pytest

from shardjax import train
from shardjax.data import Loader
from shardjax.embed import Storage
from shardjax.embed.disk_rows import DiskRows
from shardjax.embed.host_rows import HostRows
from shardjax.embed.moves import WriteBack
from tests.embed.test_tiers import OPTIMIZERS, Run, assert_same, batches

STEPS, KEYS, EVERY = 200, 6000, 25


@functools.cache
def made():
    return batches(STEPS, keys=KEYS, power=0.3)


@functools.cache
def probe():
    return batches(1, keys=KEYS, seed=5, power=0.3)[0]


@functools.cache
def reference(mesh: str, optimizer: str):
    """The run with all rows on the devices, and what evaluation saw on the way."""
    run = Run(mesh, optimizer)
    seen = []
    for step, batch in enumerate(made()):
        run.train([batch])
        if step % EVERY == 0:
            seen.append(run.predict(probe()))
    return run, seen


def delayed(function, chance=0.3):
    """A function that at times takes up to 3 ms longer."""
    draw = random.Random(0)

    @functools.wraps(function)
    def slow(*args, **kwargs):
        if draw.random() < chance:
            time.sleep(0.003 * draw.random())
        return function(*args, **kwargs)

    return slow


@pytest.fixture
def slow_tiers(monkeypatch):
    """RAM, disk and the way from the devices take longer, at random."""
    for owner, names in (
        (HostRows, ("take", "release", "coldest")),
        (DiskRows, ("_find", "_write", "_compact")),
        (WriteBack, ("parts",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, delayed(getattr(owner, name)))
    draw = random.Random(1)
    arrived = WriteBack.has_arrived
    late = property(lambda x: draw.random() < 0.5 and arrived.__get__(x))
    monkeypatch.setattr(WriteBack, "has_arrived", late)


LOOKAHEADS = (1, 2, 7, 50)


MESHES = ("1x1", "8x1", "4x2")


def cases(everything: bool) -> list[tuple[str, str, int]]:
    """Meshes, optimizers and look-aheads: all of them, or each pair of values once."""
    optimizers = list(OPTIMIZERS)
    return [
        (mesh, optimizers[(m + k + more) % 3], lookahead)
        for m, mesh in enumerate(MESHES)
        for k, lookahead in enumerate(LOOKAHEADS)
        for more in (range(3) if everything else (0,))
    ]


def pytest_generate_tests(metafunc):
    """Gives the long runs their combinations, all if `--all-combinations` asks for them."""
    names = ("mesh", "optimizer", "lookahead")
    if set(names) <= set(metafunc.fixturenames):
        metafunc.parametrize(
            names, cases(metafunc.config.getoption("--all-combinations"))
        )


def test_a_usual_run_has_each_pair_of_values():
    usual, everything = cases(False), cases(True)
    assert (len(usual), len(set(everything))) == (12, 36)
    assert set(usual) < set(everything)
    values = MESHES, tuple(OPTIMIZERS), LOOKAHEADS
    for i, j in itertools.combinations(range(3), 2):
        pairs = {(case[i], case[j]) for case in usual}
        assert pairs == set(itertools.product(values[i], values[j]))


def test_tiers_change_no_bit(mesh, optimizer, lookahead, slow_tiers, tmp_path):
    plain, seen = reference(mesh, optimizer)
    touched = sum(s["rows"] for s in plain.collection.stats().values())
    storage = Storage(
        device_rows=touched // 20, host_bytes="1GB", disk=tmp_path / "rows"
    )
    run = Run(mesh, optimizer, storage, lookahead)
    tier = run.collection.planner.tiers[0]
    tier.disk._merge_bytes = 1 << 15
    most = touched // 5 * tier.host.row_bytes
    room = run.collection.planner.drafter
    room.room = lambda tier: most  # of rows alone, whatever the index takes
    loader = Loader(
        InOrder(made()),
        len(made()[0].labels),
        map=lambda many: train.prepare_window(run.collection, many),
        window=lookahead,
    )
    found = []
    for step, batch in enumerate(loader):
        run.take(batch)
        if step % EVERY == 0:
            found.append(run.predict(probe()))
    for (ours, unseen), (theirs, expected) in zip(found, seen, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert unseen == expected
    assert_same(plain, run, KEYS)
    stats = run.collection.stats()["group0"]
    assert stats["rows"] == touched and stats["device_rows"] <= touched / 20
    # how many depends on what was under way when; what windows planned ahead send to RAM
    # comes on top of its budget
    assert stats["disk_rows"] > 0 and run.counters["disk_hits"] > 0
    assert tier.disk.compactions > 0
    if lookahead <= 2:
        assert stats["host_rows"] <= touched / 5
    run.collection.close()


class InOrder:
    """A source of batches as they are."""

    def __init__(self, batches):
        self.batches = batches

    def chunks(self, start: int = 0):
        """The batches from a number on."""
        yield from self.batches[start:]

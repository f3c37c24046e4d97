"""Whatever a collection is told, in any order: rows are where they should be, and equal.

Hypothesis makes up sequences over a few keys. A collection with tiers is told the same as one
with all rows on the devices and as a model in plain Python, which says which keys have a row.
"""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardjax.embed import (
    LRU,
    TTL,
    EmbeddingCollection,
    FeatureSpec,
    MinCount,
    ShowClick,
    Storage,
    TableSpec,
    uniform,
)
from shardjax.embed.moves import SlabState
from shardjax.mesh import make_mesh
from tests.embed.test_policies import Model, salt_of
from tests.embed.test_tiers import OPTIMIZERS

KEYS = np.array([*range(22), 2**63, 2**64 - 1], np.uint64)
# made once: programs are shared by all collections whose tables are equal
ITEMS = {
    name: TableSpec("item", 4, OPTIMIZERS["adam"], initializer=uniform(1.0), **policies)
    for name, policies in {
        "lru, ttl, count": {
            "evict": (LRU(rows=12, every=5), TTL(9, every=4)),
            "admit": MinCount(2),
        },
        "show_click": {"evict": ShowClick(0.8, 0.25, every=6)},
    }.items()
}
BATCH = st.lists(st.sampled_from(KEYS.tolist()), min_size=1, max_size=8)
BATCHES = st.lists(BATCH, min_size=1, max_size=3)
WHAT = ("train", "train", "train", "evaluate", "load", "shrink", "merge", "abandon")
ACTIONS = st.lists(st.tuples(st.sampled_from(WHAT), BATCHES), max_size=20)


@jax.jit
def step(slab: SlabState, slots: jax.Array) -> SlabState:
    """Changes rows and their state as training would, by what they are."""

    def change(x):
        return x.at[slots].set(x.at[slots].get(mode="clip") * 0.5 + 1, mode="drop")

    return SlabState(
        change(slab.rows), [change(x) for x in slab.row_state], slab.shared
    )


def labels_of(keys) -> np.ndarray:
    """Clicks on some of the examples."""
    return (np.arange(len(keys)) % 3 == 0).astype(np.float32)


class Told:
    """A collection, and its state."""

    def __init__(self, item: TableSpec, storage: Storage | None):
        self.collection = EmbeddingCollection(
            {"item": FeatureSpec(item)}, mesh=make_mesh("1x1"), storage=storage
        )
        self.state = self.collection.init()

    def tell(self, what: str, batches: list[list[int]], number: int):
        """Does it; returns what is to be the same everywhere, if anything."""
        keys = [np.array(x, np.uint64) for x in batches]
        if what == "train":
            window = [({"item": k}, len(k), labels_of(k)) for k in keys]
            for plan in list(self.collection.plan_window(window)):
                [slab] = self.collection.apply_fills(self.state, plan)
                self.state = (step(slab, plan.arrays["group0/slots"][0]),)
        elif what == "abandon":
            args = {"item": keys[0]}, len(keys[0]), labels_of(keys[0])
            self.collection.plan(*args, train=True)
        elif what == "load":
            own = np.unique(keys[0])
            values = np.arange(4 * len(own)).reshape(-1, 4) + number / 7
            self.state = self.collection.load_rows(self.state, "item", own, values)
        elif what == "evaluate":
            plan = self.collection.plan({"item": keys[0]}, len(keys[0]), train=False)
            return plan.counters["unseen"]
        elif what == "shrink":
            return self.collection.shrink()
        elif what == "merge":
            disk = self.collection.planner.tiers[0].disk
            if disk is not None and disk.segments:
                disk.wait()
                disk._compact(list(disk.segments))
        return None

    def rows(self) -> dict[str, np.ndarray]:
        """All that `export` and `lookup_rows` say, in the order of the keys."""
        read: Any = self.collection.lookup_rows(self.state, "item", KEYS)
        found: dict[str, np.ndarray] = {
            "found": read["found"],
            "looked_up": read["rows"],
        }
        for part in self.collection.export(self.state, "item"):
            order = np.argsort(part.keys)
            found |= {f"state{i}": x[order] for i, x in enumerate(part.row_state)}
            found |= {
                name: getattr(part, name)[order]
                for name in ("keys", "rows", "last_step", "uses", "scores")
                if getattr(part, name) is not None
            }
        return found


class Expected:
    """The model, told the same."""

    def __init__(self, item: TableSpec, salt: int):
        self.model = Model(item, salt)
        self.there: set[int] = set()  # have a row as trained

    def tell(self, what: str, batches: list[list[int]]):
        model = self.model
        if what in ("train", "abandon"):
            for keys in batches if what == "train" else batches[:1]:
                model.batch(keys, labels_of(keys))
        elif what == "load":
            own = sorted(set(batches[0]))
            for key in own:
                model.counts[key] = 10  # no admission is asked
            model.batch(own, [1] * len(own))
            for key in own:
                model.counts.pop(key, None)
        elif what == "evaluate":
            return sum(key not in self.there for key in batches[0])
        elif what == "shrink":
            before = len(model.rows)
            model.step += 1
            model.evict(model.spec.evictions)
            model.step -= 1
            return {"item": before - len(model.rows)}
        if what in ("train", "load"):
            self.there = set(model.rows)
        return None


@pytest.mark.parametrize("policy", list(ITEMS))
@given(ACTIONS, st.sampled_from(["1KB", "1GB"]))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_any_sequence_ends_with_the_same_rows(tmp_path, policy, actions, host_bytes):
    item = ITEMS[policy]
    storage = Storage(device_rows=10, host_bytes=host_bytes, disk=tmp_path / "rows")
    plain, tiered = Told(item, None), Told(item, storage)
    expected = Expected(item, salt_of(plain.collection))
    try:
        for number, (what, batches) in enumerate(actions):
            answer = expected.tell(what, batches)
            assert plain.tell(what, batches, number) == answer
            assert tiered.tell(what, batches, number) == answer
            held = [set(x.collection.keys("item").tolist()) for x in (plain, tiered)]
            assert held == [expected.there] * 2
        ours, theirs = tiered.rows(), plain.rows()
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            np.testing.assert_array_equal(values, theirs[name], err_msg=name)
        there = sorted(expected.there)
        assert KEYS[ours["found"]].tolist() == there
        assert ours.get("keys", np.zeros(0)).tolist() == there
    finally:
        tiered.collection.close()


def test_such_sequences_reach_every_tier(tmp_path):
    storage = Storage(device_rows=10, host_bytes="1KB", disk=tmp_path / "rows")
    told = Told(ITEMS["show_click"], storage)
    try:
        for start in (0, 8, 16, 0):
            for leaving in told.collection.planner.tiers[0]._flying.values():
                leaving.parts()  # rows on their way to the RAM tier do not go to disk
            told.tell("train", [KEYS[start : start + 8].tolist()], 0)
        stats = told.collection.stats()["group0"]
        assert (stats["rows"], stats["device_rows"]) == (24, 10)
        assert stats["disk_rows"] > 0
        told.tell("merge", [], 0)
        assert told.rows()["found"].all()
    finally:
        told.collection.close()

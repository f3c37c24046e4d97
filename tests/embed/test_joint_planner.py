"""Planning together: processes played by threads, without devices."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shardjax as sj
from shardjax import embed
from shardjax.embed.drafting import PlanError
from shardjax.embed.groups import plan_groups
from shardjax.embed.joint import Abandoned, JointBatch, JointPlanner
from shardjax.embed.plan import Planner
from shardjax.embed.span import DeviceSpan
from shardjax.embed.translate import owners_of
from shardjax.together import together

DEVICES = 8


class Room:
    """Where values of several threads meet."""

    def __init__(self, count: int):
        self._values: list[bytes] = [b""] * count
        self._barrier = threading.Barrier(count, timeout=20)

    def exchange(self, process: int):
        def exchange(value: bytes) -> list[bytes]:
            self._values[process] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return exchange


class Players:
    """A planner of each process, in a thread."""

    def __init__(self, features, processes: int):
        self.count = processes
        each = DEVICES // processes
        groups = plan_groups(features, DEVICES)
        self.spans = [DeviceSpan(DEVICES, p * each, each) for p in range(processes)]
        self.planners = [JointPlanner(groups, features, s, 0) for s in self.spans]
        room = Room(processes)
        self.agree = [room.exchange(p) for p in range(processes)]

    def all(self, call):
        """What a call of each process returns or raises."""

        def one(process):
            try:
                return call(process)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))

    def plan(self, batches, train=True):
        """Plans of each process for its batches."""
        asks = self.all(
            lambda p: self.planners[p].ask(batches[p], self.agree[p], train=train)
        )
        if any(isinstance(x, Exception) for x in asks):
            return asks
        for p, ask in enumerate(asks):
            first, count = self.spans[p].first, self.spans[p].count
            parts = [a.messages[:, first : first + count] for a in asks]
            received = np.concatenate(parts).transpose(1, 0, 2)
            ask.sent(lambda received=received: received)

        def answer(p):
            plans = self.planners[p].answer(asks[p], self.agree[p])
            if asks[p].error is not None:
                return plans, asks[p].error
            return plans

        return self.all(answer)


def spec(name, **options):
    return embed.FeatureSpec(embed.TableSpec(name, dim=2, **options))


def parts(features, size, processes, examples):
    """Each process's part of a batch of all."""
    each = DEVICES // processes * examples
    out = []
    for p in range(processes):
        own = slice(min(p * each, size), min((p + 1) * each, size))
        mine = {n: x[own] for n, x in features.items()}
        out.append([JointBatch(mine, own.stop - own.start, examples)])
    return out


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_each_id_finds_its_row_whoever_owns_it(processes):
    features = {"a": spec("a"), "b": spec("b", placement="table_wise")}
    rng = np.random.default_rng(processes)
    size, examples = 42, 6  # the last devices have fewer, or none
    values = {n: rng.zipf(1.4, size).astype(np.uint64) for n in features}
    players = Players(features, processes)
    found = players.plan(parts(values, size, processes, examples))
    plans = [own[0] for own in found]
    [alone] = Planner(plan_groups(features, DEVICES), features, DEVICES, 0).plan_window(
        [(values, size)]
    )
    first = plans[0]
    assert all(p.groups == first.groups for p in plans)
    assert first.groups[0].send == alone.groups[0].send
    name = first.groups[0].name
    merge = np.concatenate([p.arrays[f"{name}/merge"] for p in plans])
    slots = np.concatenate([p.arrays[f"{name}/slots"] for p in plans])
    fixed = np.concatenate([p.arrays[f"{name}/fixed"] for p in plans])
    send = first.groups[0].send
    # which key is in which slot of which owner
    key_at = {}
    for p, planner in enumerate(players.planners):
        for t, state in enumerate(planner.core.tables[0]):
            known, where = state.index.items()
            owners = players.spans[p].first + owners_of(
                known, state.table.owner, players.spans[p]
            )
            for key, owner, slot in zip(known, owners, where, strict=True):
                key_at[int(owner), int(slot)] = t, int(key - state.table.salt)
    columns = first.groups[0].fixed
    for example in range(size):
        device, place = divmod(example, examples)
        for c, feature in enumerate(columns):
            owner, at = divmod(int(fixed[device, place * len(columns) + c]), send)
            slot = int(slots[owner, merge[owner, device, at]])
            assert key_at[owner, slot] == (c, int(values[feature][example]))
    counted = ("ids", "unique_ids", "inserted", "examples", "padding_rows")
    for plan in plans:
        for counter in counted[:3]:
            assert plan.counters[counter] == alone.counters[counter]
        assert plan.counters["examples"] == size
        assert plan.slots == first.slots


def test_an_error_of_one_process_is_one_of_all_and_nothing_has_changed():
    features = {"a": spec("a", vocabulary=10)}
    players = Players(features, 2)
    values = {"a": np.arange(8, dtype=np.uint64) + np.uint64(6)}  # 12, 13 in the second
    found = players.plan(parts(values, 8, 2, 1))
    plans, theirs = found[0]  # pyright: ignore[reportGeneralTypeIssues]
    others, own = found[1]  # pyright: ignore[reportGeneralTypeIssues]
    assert plans == others == []
    assert isinstance(own, PlanError) and "4 ids outside the vocabulary" in str(own)
    assert "process 1 could not plan its part of a batch: PlanError" in str(theirs)
    good = players.plan(parts({"a": values["a"] - np.uint64(6)}, 8, 2, 1))
    assert [len(x) for x in good] == [1, 1]
    assert good[0][0].counters["inserted"] == 8


def test_a_full_table_of_one_process_is_an_error_of_all():
    features = {"a": spec("a", capacity=40)}  # 20 in each of two
    players = Players(features, 2)
    values = {"a": np.arange(200, dtype=np.uint64)}
    found = players.plan(parts(values, 200, 2, 25))
    assert all(isinstance(x, PlanError) for x in found)
    assert any("table 'a' is full" in str(x) for x in found)
    again = players.plan(parts(values, 200, 2, 25))
    assert all("cannot be trained on" in str(x) for x in again)


def test_processes_that_plan_other_batches_are_told_so():
    features = {"a": spec("a")}
    players = Players(features, 2)
    batch = JointBatch({"a": np.arange(4, dtype=np.uint64)}, 4, 1)
    for error in players.plan([[batch], [batch, batch]]):
        assert isinstance(error, PlanError)
        assert "must plan the same batches of a window, got by process" in str(error)
    wide = JointBatch(batch.features, 4, 2)
    for error in players.plan([[batch], [wide]]):
        assert "must plan the same examples of a window" in str(error)
    bag = embed.Jagged(np.arange(4, dtype=np.uint64), np.ones(4, np.int32))
    for error in players.plan([[batch], [JointBatch({"a": bag}, 4, 1)]]):
        assert isinstance(error, PlanError)
        assert "'a' must come in the same form in all processes, got one key" in str(
            error
        )
        assert "process 0 and a bag of keys in process 1" in str(error)
    wanted = JointBatch(batch.features, 4, 1, form={"number of dense features": 2})
    for error in players.plan([[wanted], [batch]]):
        assert isinstance(error, PlanError)
        assert "same number of dense features in all processes, got 2 in pr" in str(
            error
        )
        assert "process 0 and None in process 1" in str(error)
    many = JointBatch({"a": np.arange(9, dtype=np.uint64)}, 9, 1)
    found = players.plan([[many], [batch]])
    assert "takes up to 4 examples of a batch, 1 per device, got 9" in str(found[0][1])
    assert "process 0 could not plan" in str(found[1][1])
    far = JointBatch(batch.features, 4, 1, dealt=2)
    found = players.plan([[far], [batch]])
    assert "`dealt` must not exceed the room of a device, 1 examples, got 2" in str(
        found[0][1]
    )


def test_a_window_that_nobody_sends_ends_in_its_thread():
    players = Players({"a": spec("a")}, 2)
    batch = JointBatch({"a": np.arange(4, dtype=np.uint64)}, 4, 1)
    asks = players.all(
        lambda p: players.planners[p].ask([batch], players.agree[p], train=True)
    )
    for ask in asks:
        ask.abandon()
        with pytest.raises(Abandoned):
            ask.wait()


def test_processes_must_have_equally_many_devices():
    features = {"a": spec("a")}
    with pytest.raises(ValueError, match="equally many devices, got 3 of 8"):
        JointPlanner(plan_groups(features, 8), features, DeviceSpan(8, 0, 3), 0)


def test_a_call_that_fails_in_one_process_fails_in_all():
    room = Room(2)

    def call(process):
        def fails():
            if process:
                raise KeyError("lost")
            return 5

        try:
            return together(room.exchange(process), fails)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(call, range(2))
    assert isinstance(second, KeyError)
    assert str(first) == "process 1 failed: KeyError: 'lost'"


def test_one_process_has_no_stream_of_plans():
    collection = embed.EmbeddingCollection({"a": spec("a")}, mesh=sj.make_mesh("1x1"))
    with pytest.raises(RuntimeError, match="`plan_stream` is for several processes"):
        collection.plan_stream([], train=True)

"""Rows that lie with their processes: none lost, none doubled, no process left waiting."""

import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardjax.data import Batch, InMemory, LocalShuffle, Share
from shardjax.data.wire import layout_of, no_rows, pack, unpack
from shardjax.embed.jagged import Jagged
from tests.data.exchanging import Threads


class Numbers:
    """Rows `first` on, in chunks of some sizes, one bad line a chunk; not by number.

    Args:
      sizes: rows of each chunk.
      first: number of the first row.
      fail: number of the chunk that raises an error.
    """

    feature_names = ("item", "tags")
    n_dense = 1

    def __init__(self, sizes, first=0, fail=None):
        self.sizes, self.first, self.fail = sizes, first, fail
        self.read = 0

    def chunks(self, start_chunk=0):
        firsts = np.cumsum([self.first, *self.sizes])
        for number in range(start_chunk, len(self.sizes)):
            if number == self.fail:
                raise OSError("the disk is gone")
            rows = firsts[number] + np.arange(self.sizes[number])
            self.read += len(rows)
            yield batch_of(rows)


def batch_of(rows):
    bags = Jagged(np.repeat(rows, rows % 3), rows % 3)
    return Batch(
        rows,
        rows[:, None],
        rows[None],
        ("item",),
        {"tags": bags},
        groups=rows,
        bad_lines=1,
    )


def sources_of(shares, kind):
    """A source for each process: chunk sizes of each, numbered on."""
    firsts = np.cumsum([0, *map(sum, shares)]).tolist()
    made = [Numbers(sizes, first) for sizes, first in zip(shares, firsts, strict=False)]
    if kind == "numbers":
        return made
    return [InMemory(source) for source in made]


def epoch_of(loops, threads):
    """The rows of each global batch of an epoch, after some checks."""
    parts = threads.run(lambda p, exchange: list(loops(p, exchange)))
    assert len({len(of_one) for of_one in parts}) == 1
    batches = []
    for step in zip(*parts, strict=True):
        assert len({part.global_rows for part in step}) == 1
        starts = np.cumsum([0, *(part.batch.size for part in step)])
        assert [part.first_row for part in step] == starts[:-1].tolist()
        assert starts[-1] == step[0].global_rows
        for part in step:
            rows = part.batch.groups.astype(np.int64)
            expected = batch_of(rows)
            np.testing.assert_array_equal(part.batch.fixed, expected.fixed)
            np.testing.assert_array_equal(part.batch.dense, expected.dense)
            for name in ("values", "lengths"):
                np.testing.assert_array_equal(
                    getattr(part.batch.jagged["tags"], name),
                    getattr(expected.jagged["tags"], name),
                )
        batches.append([int(g) for part in step for g in part.batch.groups])
    return batches


def shuffles(sources, batch_size=8, window_rows=20, seed=5, devices=1, **options):
    """A function that gives each process its LocalShuffle, the same one again."""
    made = {}

    def loop(process, exchange):
        share = Share(process, len(sources), devices)
        if process not in made:
            made[process] = LocalShuffle(
                sources[process],
                batch_size,
                share,
                lambda messages: made[process].carry(messages),
                shuffle_seed=seed,
                window_rows=window_rows,
                **options,
            )
        made[process].carry = exchange
        return made[process]

    loop.made = made
    return loop


SHARES = {
    "one": [[7, 0, 12, 5]],
    "even": [[10, 10], [5, 15]],
    "uneven": [[3], [20, 21, 9], [11]],
    "empty": [[], [13, 2], []],
    "tiny": [[1], [], [1], []],
    "last": [[], [], [40]],
}


@pytest.mark.parametrize("kind", ["numbers", "memory"])
@pytest.mark.parametrize("shares", SHARES)
def test_an_epoch_has_every_row_once(shares, kind):
    shares = SHARES[shares]
    rows, threads = sum(map(sum, shares)), Threads(len(shares))
    for batch_size, window_rows, devices in ((8, 20, 1), (5, 12, 2), (100, 7, 1)):
        loop = shuffles(
            sources_of(shares, kind), batch_size, window_rows, devices=devices
        )
        epochs = [epoch_of(loop, threads) for _ in range(2)]
        for batches in epochs:
            assert sorted(sum(batches, [])) == list(range(rows))
            full, last = divmod(rows, batch_size)
            sizes = [batch_size] * full + [last] * (last > 0)
            assert list(map(len, batches)) == sizes
        if rows > 10:
            assert epochs[0] != epochs[1]
        again = shuffles(
            sources_of(shares, kind), batch_size, window_rows, devices=devices
        )
        assert epoch_of(again, threads) == epochs[0]
        other = shuffles(
            sources_of(shares, kind), batch_size, window_rows, seed=6, devices=devices
        )
        assert rows < 10 or epoch_of(other, threads) != epochs[0]
        assert {loop.made[p].epoch for p in loop.made} == {2}
        if kind == "numbers":
            bad = 2 * sum(map(len, shares))
            assert {loop.made[p].bad_lines for p in loop.made} == {bad}


def test_any_row_can_land_anywhere():
    # 3 processes of 10, 20 and 30 rows, sorted; windows of a quarter of them.
    shares, epochs, rows, bins = [[10], [20], [30]], 90, 60, 6
    threads = Threads(3)
    loop = shuffles(sources_of(shares, "memory"), batch_size=60, window_rows=15)
    cells = np.zeros((bins, bins))
    for _ in range(epochs):
        order = np.array(sum(epoch_of(loop, threads), []))
        np.add.at(cells, (np.arange(rows) * bins // rows, order * bins // rows), 1)
    expected = epochs * rows / bins**2
    chi = ((cells - expected) ** 2 / expected).sum()
    free = (bins - 1) ** 2
    assert (chi - free) / math.sqrt(2 * free) < 4


@settings(max_examples=15)
@given(
    shares=st.lists(
        st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3
    ).filter(lambda shares: sum(map(sum, shares)) > 0),
    batch_size=st.integers(1, 9),
    window_rows=st.integers(1, 30),
    kind=st.sampled_from(["numbers", "memory"]),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_resume_changes_nothing(shares, batch_size, window_rows, kind, drop_last, data):
    threads, rows = Threads(len(shares)), sum(map(sum, shares))
    if drop_last:
        batch_size = min(batch_size, rows)
    options = {"drop_last": drop_last}

    def make():
        return shuffles(sources_of(shares, kind), batch_size, window_rows, **options)

    whole = make()
    everything = epoch_of(whole, threads)
    second = epoch_of(whole, threads)
    stop = data.draw(st.integers(1, len(everything)))
    before, states = make(), {}

    def leave(process, exchange):
        loop = iter(before(process, exchange))
        for _ in range(stop):
            next(loop)
        states[process] = json.loads(json.dumps(before.made[process].get_state()))
        loop.close()

    threads.run(leave)
    assert all(state == states[0] for state in states.values())
    after = make()
    for process in range(len(shares)):
        after(process, None).set_state(states[process])
    assert epoch_of(after, threads) == everything[stop:]
    assert epoch_of(after, threads) == second
    assert after.made[0].get_state() == whole.made[0].get_state()
    # Also without a fresh start.
    assert epoch_of(before, threads) == everything[stop:]


def test_memory_is_bounded():
    threads = Threads(3)
    sources = sources_of([[10] * 100, [10] * 10, [10] * 55], "numbers")
    given = [0, 0, 0]

    def run(process, exchange):
        for part in loop(process, exchange):
            given[process] += part.batch.size
            ahead = sum(s.read for s in sources) - sum(given)
            assert ahead < 3 * (60 + 30 + 20)

    loop = shuffles(sources, batch_size=9, window_rows=60)
    threads.run(run)
    assert sum(given) == 1650
    # Its third of a window read, one read ahead, what it got of one, and part of a batch.
    assert max(loop.made[p].most_rows_held for p in loop.made) <= 20 + 20 + 60 + 3
    assert threads.most_bytes < 5000


def test_a_reading_error_is_raised_everywhere():
    threads = Threads(3)
    sources = sources_of([[10] * 9] * 3, "numbers")
    sources[1].fail = 5
    loop = shuffles(sources)
    with pytest.raises(
        RuntimeError, match="process 1 could not read .* OSError: the disk"
    ):
        epoch_of(loop, threads)
    assert isinstance(threads.errors[1], OSError)
    assert isinstance(threads.errors[2], RuntimeError)
    assert loop.made[0].batches == loop.made[1].batches > 0
    # It can go on.
    sources[1].fail = None
    left = epoch_of(loop, threads)
    assert len(left) + loop.made[0].batches < 34 + 1
    assert not [t for t in threading.enumerate() if t.name.startswith("local_windows")]


def test_an_error_of_counting_is_raised_everywhere():
    sources = [InMemory(Numbers([5])), InMemory(Numbers([5], fail=0))]
    with pytest.raises(
        RuntimeError, match="process 1 could not read its rows: OSError"
    ):
        epoch_of(shuffles(sources), Threads(2))


def test_no_rows_at_all_are_an_error_everywhere():
    for kind in ("numbers", "memory"):
        threads = Threads(2)
        with pytest.raises(
            ValueError, match="must give at least one row an epoch, got none"
        ):
            epoch_of(shuffles(sources_of([[], []], kind)), threads)
        assert [type(error) for error in threads.errors] == [ValueError] * 2


def test_processes_that_differ_are_told():
    threads = Threads(2)

    def run(**other):
        def work(process, exchange):
            options = {"shuffle_seed": 1} | (other if process else {})
            share = Share(process, 2)
            source = Numbers([5])
            return list(LocalShuffle(source, 4, share, exchange, **options))

        return threads.run(work)

    with pytest.raises(
        ValueError, match="`shuffle_seed` must be the same in all .* got 1 in"
    ):
        run(shuffle_seed=2)
    with pytest.raises(ValueError, match="`window_rows` must be the same in all"):
        run(window_rows=7)

    def other_arrays(process, exchange):
        source = Numbers([5])
        if process:
            chunk = batch_of(np.arange(5))
            source.chunks = lambda: iter([Batch(**{**vars(chunk), "groups": None})])
        share = Share(process, 2)
        return list(LocalShuffle(source, 4, share, exchange, shuffle_seed=1))

    with pytest.raises(
        ValueError, match="must have the same arrays, .* in process 1, .*false"
    ):
        threads.run(other_arrays)


def test_an_exchange_that_mixes_up_processes_is_told():
    def work(process, exchange):
        mixed = lambda messages: exchange(messages)[::-1]  # noqa: E731
        share = Share(process, 2)
        return list(LocalShuffle(Numbers([5]), 4, share, mixed, shuffle_seed=1))

    with pytest.raises(RuntimeError, match=r"received by process, .* got .* \[1, 0\]"):
        Threads(2).run(work)


def test_states_that_do_not_fit():
    one = LocalShuffle(Numbers([5]), 4, Share(0, 2), list, shuffle_seed=1)
    two = LocalShuffle(Numbers([5]), 4, Share(0, 3), list, shuffle_seed=1)
    with pytest.raises(
        ValueError, match="`processes` must be .* taken, 2, got 3. Rows"
    ):
        two.set_state(one.get_state())
    with pytest.raises(
        ValueError, match="state of a LocalShuffle must have the entries"
    ):
        two.set_state({})
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        LocalShuffle(Numbers([5]), 0, Share(0, 1), list, shuffle_seed=1)
    alone = LocalShuffle(Numbers([5]), 2, Share(0, 1), list, shuffle_seed=1)
    for _ in alone:
        with pytest.raises(
            RuntimeError, match="cannot set its state: a loop over this"
        ):
            alone.set_state(alone.get_state())
        with pytest.raises(
            RuntimeError, match="cannot iterate over it twice at a time"
        ):
            next(iter(alone))
    assert alone.epoch == 1


def test_rows_survive_the_wire():
    rows = np.arange(7)
    full = batch_of(rows)
    weighted = Jagged(np.arange(3), np.array([1, 2]), np.ones(3))
    several = [
        full,
        full.take([]),
        Batch([0, 1], np.zeros((2, 0)), np.zeros((0, 2), int), weights=[2, 3]),
        Batch([0, 1], np.zeros((2, 3)), np.zeros((0, 2), int), jagged={"a": weighted}),
    ]
    for batch in several:
        got = unpack(pack(batch))
        assert layout_of(got) == layout_of(batch)
        for name in ("labels", "dense", "fixed", "weights", "groups"):
            np.testing.assert_array_equal(getattr(got, name), getattr(batch, name))
        for name, bags in batch.jagged.items():
            for array in ("values", "lengths", "weights"):
                np.testing.assert_array_equal(
                    getattr(got.jagged[name], array), getattr(bags, array)
                )
        assert Batch.concat([no_rows(layout_of(batch)), got]).size == batch.size

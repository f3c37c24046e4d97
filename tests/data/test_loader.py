"""The loader under fault: errors at their step, no thread left, resume to the bit."""

import gc
import json
import threading
import time
import traceback

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardjax.data import Batch, InMemory, Loader, Synthetic


class Numbers:
    """A source whose labels are the rows' numbers, one bad line a chunk.

    Args:
      sizes: rows of each chunk.
      fail: number of a chunk at which an error is raised.
      delay: seconds that each chunk takes.
    """

    feature_names = ()
    n_dense = 0

    def __init__(self, sizes, fail=None, delay=0.0):
        self.sizes, self.fail, self.delay = sizes, fail, delay
        self.read = []

    def chunks(self, start_chunk=0):
        firsts = np.cumsum([0, *self.sizes])
        for number in range(start_chunk, len(self.sizes)):
            self.read.append(number)
            if number == self.fail:
                raise OSError(f"chunk {number} is broken")
            time.sleep(self.delay)
            size = self.sizes[number]
            yield Batch(
                firsts[number] + np.arange(size),
                np.zeros((size, 0)),
                np.zeros((0, size), int),
                bad_lines=1,
            )


def rows_of(batches):
    return [batch.labels.astype(int).tolist() for batch in batches]


def our_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("loader_")]


SHUFFLED = {"shuffle_seed": 3, "shuffle_rows": 20}


def test_an_epoch_is_the_batches_in_order():
    loader = Loader(Numbers([7, 0, 7, 7]), 5)
    assert rows_of(loader) == [list(range(a, min(a + 5, 21))) for a in range(0, 21, 5)]
    assert (loader.epoch, loader.batches, loader.bad_lines) == (1, 0, 4)
    assert our_threads() == []


def test_every_loop_is_an_epoch_with_an_order_of_its_own():
    loader = Loader(Numbers([7] * 6), 5, **SHUFFLED)
    epochs = [sum(rows_of(loader), []) for _ in range(3)]
    assert loader.epoch == 3
    assert [sorted(rows) for rows in epochs] == [list(range(42))] * 3
    assert len(set(map(tuple, epochs))) == 3
    again = Loader(Numbers([7] * 6), 5, **SHUFFLED)
    assert [sum(rows_of(again), []) for _ in range(3)] == epochs
    other = Loader(Numbers([7] * 6), 5, shuffle_seed=4, shuffle_rows=20)
    assert sum(rows_of(other), []) != epochs[0]


def test_drop_last_counts_what_it_drops():
    loader = Loader(Numbers([7, 7]), 5, drop_last=True)
    assert [batch.size for batch in loader] == [5, 5]
    assert [batch.size for batch in loader] == [5, 5]
    assert loader.dropped_rows == 8


def test_map_is_called_in_order_in_one_thread():
    seen = []

    def plan(batch):
        seen.append((int(batch.labels[0]), threading.current_thread().name))
        return f"plan {len(seen)}"

    loader = Loader(Numbers([10] * 3), 3, map=plan)
    assert list(loader) == [f"plan {i}" for i in range(1, 11)]
    assert [row for row, _ in seen] == list(range(0, 30, 3))
    assert {name for _, name in seen} == {"loader_map_into"}


def test_map_may_return_none():
    assert list(Loader(Numbers([4]), 2, map=lambda batch: None)) == [None, None]


def test_an_error_of_map_surfaces_at_its_step():
    def plan(batch):
        if batch.labels[0] == 6:  # batch 3
            raise LookupError("key 17 has no row")
        return batch

    loader = Loader(Numbers([10] * 3), 2, map=plan, prefetch=8)
    received = []
    with pytest.raises(LookupError, match="key 17 has no row") as caught:
        received.extend(iter(loader))
    # The traceback leads to the line that raised, in the thread.
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "plan"
    assert loader.batches == 3
    assert our_threads() == []


def test_batches_before_an_error_are_given():
    loader = Loader(Numbers([10] * 3, fail=2), 4, prefetch=8)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with pytest.raises(OSError, match="chunk 2 is broken") as caught:
        next(batches)
    assert type(caught.value) is OSError
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "chunks"
    assert (loader.epoch, loader.batches) == (0, 5)
    with pytest.raises(StopIteration):
        next(batches)


def test_after_an_error_the_loader_can_go_on():
    source = Numbers([10] * 3, fail=2)
    loader = Loader(source, 4)
    with pytest.raises(OSError, match="chunk 2"):
        list(loader)
    source.fail = None
    assert rows_of(loader) == [[20, 21, 22, 23], [24, 25, 26, 27], [28, 29]]
    assert loader.epoch == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_an_error_in_the_loop_stops_the_threads(error):
    def consume():
        for batch in loader:
            if batch.labels[0] == 4:
                raise error

    loader = Loader(Numbers([10] * 50), 2, map=lambda batch: batch)
    with pytest.raises(error):
        consume()
    assert our_threads() == []
    assert loader.batches == 3


@pytest.mark.parametrize("map", [None, lambda batch: batch])
def test_leaving_a_loop_stops_the_threads(map):
    source = Numbers([10] * 1000)
    loader = Loader(source, 2, map=map)
    for _ in loader:
        break
    assert our_threads() == []
    assert len(source.read) < 20


def test_dropping_an_iterator_stops_the_threads():
    loader = Loader(Numbers([10] * 1000), 2)
    batches = iter(loader)
    next(batches)
    assert our_threads() == ["loader_read_into"]
    del batches
    gc.collect()
    assert our_threads() == []


def test_an_iterator_that_was_never_started_holds_nothing():
    loader = Loader(Numbers([10]), 2)
    iter(loader)
    assert our_threads() == []
    assert len(list(loader)) == 5


def test_a_loop_after_break_gives_the_rest_of_the_epoch():
    loader = Loader(Numbers([10] * 3), 4)
    for batch in loader:
        if batch.labels[0] == 8:
            break
    assert (loader.epoch, loader.batches) == (0, 3)
    assert rows_of(loader)[0] == [12, 13, 14, 15]
    assert rows_of(loader)[0] == [0, 1, 2, 3]


def test_skip_epoch_leaves_the_rest():
    loader = Loader(Numbers([10] * 3), 4)
    for _ in loader:
        break
    loader.skip_epoch()
    assert (loader.epoch, loader.batches) == (1, 0)
    assert rows_of(loader)[0] == [0, 1, 2, 3]


def test_a_loader_has_one_loop_at_a_time():
    loader = Loader(Numbers([10] * 3), 4)
    batches, early = iter(loader), iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match="iterate over the loader twice at a time"):
        iter(loader)
    with pytest.raises(RuntimeError, match="in epoch 0 after 1 batches"):
        next(early)
    with pytest.raises(RuntimeError, match="cannot set the state"):
        loader.set_state(loader.get_state())
    with pytest.raises(RuntimeError, match="cannot skip the epoch"):
        loader.skip_epoch()
    batches.close()
    assert len(list(loader)) == 7


@pytest.mark.parametrize("source", [Numbers([]), Numbers([0, 0]), Synthetic(rows=0)])
def test_an_empty_source_is_an_error(source):
    with pytest.raises(
        ValueError, match="must give at least one batch an epoch, got 0"
    ):
        list(Loader(source, 4))
    assert our_threads() == []


def test_a_source_smaller_than_a_batch_is_an_error_with_drop_last():
    assert len(list(Loader(Numbers([3]), 4))) == 1
    loader = Loader(Numbers([3]), 4, drop_last=True)
    with pytest.raises(ValueError, match="got 3 rows in epoch 0 with drop_last=True"):
        list(loader)


def test_a_source_that_runs_dry_in_the_second_epoch_is_an_error():
    source = Numbers([5])
    loader = Loader(source, 4)
    assert len(list(loader)) == 2
    source.sizes = []
    with pytest.raises(ValueError, match="got 0 rows in epoch 1"):
        list(loader)


def test_a_slow_producer_makes_the_consumer_wait():
    loader = Loader(Numbers([2] * 5, delay=0.05), 2)
    assert len(list(loader)) == 5
    assert 0.2 < loader.wait_seconds < 2


@pytest.mark.parametrize("change", [None, lambda batch: batch])
def test_a_waiting_consumer_does_something_meanwhile(change):
    threads = []

    def meanwhile():
        threads.append(threading.current_thread())

    loader = Loader(Numbers([2] * 4, delay=0.05), 2, map=change, meanwhile=meanwhile)
    for _ in loader:
        count = len(threads)
        time.sleep(0.01)
        assert len(threads) == count  # it does not wait here
    assert set(threads) == {threading.current_thread()}
    assert count > 3
    assert 0.15 < loader.wait_seconds < 2


def test_an_error_meanwhile_ends_the_loop():
    def meanwhile():
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        list(Loader(Numbers([2] * 4, delay=0.05), 2, meanwhile=meanwhile))


def test_a_slow_consumer_bounds_what_is_read():
    source, seen = Numbers([2] * 100), []
    loader = Loader(source, 2, map=lambda batch: seen.append(batch), prefetch=3)
    began = time.perf_counter()
    for _ in loader:
        time.sleep(0.005)
        # 3 finished, 2 read, and one in the hand of each thread and the consumer
        assert len(source.read) - loader.batches <= 3 + 2 + 2
        assert len(seen) - loader.batches <= 3 + 1
    assert loader.wait_seconds < 0.5 * (time.perf_counter() - began)


def test_reading_overlaps_with_the_consumer():
    loader = Loader(Numbers([2] * 10, delay=0.05), 2)
    began = time.perf_counter()
    for _ in loader:
        time.sleep(0.05)
    # 1 s one after the other, 0.55 s at once
    assert time.perf_counter() - began < 0.85


def test_bad_lines_are_counted_when_their_rows_arrive():
    loader = Loader(Numbers([4] * 5), 4, prefetch=5)
    counts = [(batch.bad_lines, loader.bad_lines) for batch in loader]
    assert counts == [(1, i) for i in range(1, 6)]
    list(loader)
    assert loader.bad_lines == 10
    shuffled = Loader(Numbers([4] * 5), 5, shuffle_seed=0, shuffle_rows=8)
    assert [batch.bad_lines for batch in shuffled] == [2, 2, 0, 1]
    assert shuffled.bad_lines == 5


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=10).filter(sum),
    batch_size=st.integers(1, 9),
    shuffled=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_resume_changes_nothing(sizes, batch_size, shuffled, drop_last, data):
    if drop_last and sum(sizes) < batch_size:
        batch_size = sum(sizes)
    options = {"drop_last": drop_last, "prefetch": 2} | (SHUFFLED if shuffled else {})

    def run(loader):
        """Two epochs: each batch, and what the loader says after it."""
        while loader.epoch < 2:
            for batch in loader:
                state = loader.get_state()
                yield rows_of([batch]), batch.bad_lines, state

    everything = list(run(Loader(Numbers(sizes), batch_size, **options)))
    stop = data.draw(st.integers(1, len(everything)))
    state = json.loads(json.dumps(everything[stop - 1][-1]))
    loader = Loader(Numbers(sizes), batch_size, **options)
    loader.set_state(state)
    assert loader.get_state() == state
    assert list(run(loader)) == everything[stop:]


def test_resume_reads_from_the_window_of_the_next_row():
    for options, first in (({}, 6), (SHUFFLED, 6)):
        loader = Loader(Numbers([10] * 10), 8, **options)
        for _ in loader:
            if loader.batches == 8:  # 64 rows: in the window of chunks 6 and 7
                break
        source, seen = Numbers([10] * 10), []
        again = Loader(source, 8, map=seen.append, **options)
        again.set_state(loader.get_state())
        assert len(list(again)) == 5
        assert len(seen) == 5
        assert source.read[0] == first


def test_a_state_between_epochs():
    loader = Loader(Numbers([7] * 6), 5, **SHUFFLED)
    list(loader)
    again = Loader(Numbers([7] * 6), 5, **SHUFFLED)
    again.set_state(loader.get_state())
    assert rows_of(again) == rows_of(loader)


def test_states_of_other_settings_are_refused():
    state = Loader(Numbers([5]), 4, **SHUFFLED).get_state()
    with pytest.raises(ValueError, match="`batch_size` must be .*, 4, got 5"):
        Loader(Numbers([5]), 5, **SHUFFLED).set_state(state)
    with pytest.raises(ValueError, match="`shuffle_seed` must be .*, 3, got None"):
        Loader(Numbers([5]), 4).set_state(state)
    with pytest.raises(ValueError, match="`shuffle_rows` must be .*, 20, got 30"):
        Loader(Numbers([5]), 4, shuffle_seed=3, shuffle_rows=30).set_state(state)
    with pytest.raises(ValueError, match="`drop_last` must be .*, False, got True"):
        Loader(Numbers([5]), 4, drop_last=True, **SHUFFLED).set_state(state)
    # How rows are held ready has no say in which rows a batch has.
    Loader(Numbers([5]), 4, prefetch=1, **SHUFFLED).set_state(state)


def test_states_that_are_none():
    loader = Loader(Numbers([5]), 4)
    state = loader.get_state()
    with pytest.raises(
        ValueError, match=r"lacks \['epoch'\] and has the unknown \['x'\]"
    ):
        loader.set_state({"x": 1, **{k: v for k, v in state.items() if k != "epoch"}})
    with pytest.raises(ValueError, match="`row` must be at least 0, got -1"):
        loader.set_state(state | {"row": -1})
    with pytest.raises(TypeError, match="`chunk` must be an integer, got '0'"):
        loader.set_state(state | {"chunk": "0"})
    assert loader.get_state() == state


def test_a_state_of_a_source_that_has_shrunk():
    loader = Loader(Numbers([10]), 4)
    for _ in loader:
        if loader.batches == 2:
            break
    again = Loader(Numbers([5]), 4)
    again.set_state(loader.get_state())
    with pytest.raises(ValueError, match="changed since the position was saved"):
        list(again)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"prefetch": 0}, "`prefetch` must be at least 1, got 0"),
        ({"shuffle_seed": -1}, "`shuffle_seed` must be at least 0, got -1"),
        ({"shuffle_rows": 0}, "`shuffle_rows` must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Loader(Numbers([5]), **({"batch_size": 1} | arguments))


def test_a_source_in_memory_is_read_once():
    source = Numbers([10] * 3)
    loader = Loader(InMemory(source), 4, shuffle_seed=0)
    first, second = rows_of(loader), rows_of(loader)
    assert source.read == [0, 1, 2]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(30))


def test_loading_costs_little():
    # Batches of 1024 of a chunk of 100 000 rows: cutting must not copy the rest again.
    source = InMemory(Synthetic(rows=200_000, chunk_rows=100_000))
    loader = Loader(source, 1024)
    list(loader)
    began = time.process_time()
    assert sum(batch.size for batch in loader) == 200_000
    assert time.process_time() - began < 0.5

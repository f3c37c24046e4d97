"""Parts by speed: the batches of an equal split, cut elsewhere, the same in all processes."""

import json
import threading

import numpy as np
import pytest

from shardjax.data import Balance, BlockShare, Loader, Share
from tests.data.test_share import ORDERS, SIZES, Numbers, Table, epoch_of


class Round:
    """What processes in threads tell each other; each loop has one of its own."""

    def __init__(self, processes):
        self.barrier = threading.Barrier(processes, timeout=20)
        self.told = [b""] * processes

    def member(self, process):
        return Member(self, process)


class Member:
    def __init__(self, round, process):
        self.round, self.process = round, process

    def exchange(self, value):
        self.round.told[self.process] = value
        self.round.barrier.wait()
        told = list(self.round.told)
        self.round.barrier.wait()
        return told

    def close(self):
        pass


class Together:
    """Gives each process its end of the next `Round`."""

    def __init__(self, processes):
        self.rounds, self.lock, self.processes = {}, threading.Lock(), processes

    def connect(self, process):
        numbers = iter(range(10**6))

        def start():
            with self.lock:
                number = next(numbers)
                round = self.rounds.setdefault(number, Round(self.processes))
            return round.member(process)

        return start


def shares_of(processes, devices=1, block_size=1, **options):
    together = Together(processes)
    return [
        BlockShare(
            Share(p, processes, devices),
            block_size,
            connect=together.connect(p),
            **options,
        )
        for p in range(processes)
    ]


def run(shares, batch_size, epochs, seconds, kind=Table, sizes=SIZES, order="none"):
    """Epochs of processes in threads; `seconds(epoch, step)` per block of each process.

    Returns the parts per process, of all epochs one after the other.
    """
    found = [[] for _ in shares]
    errors = []

    def work(p):
        try:
            loader = Loader(
                kind(sizes), batch_size, share=shares[p], prefetch=1, **ORDERS[order]
            )
            for epoch in range(epochs):
                for step, part in enumerate(loader):
                    found[p].append(part)
                    shares[p].observe(3 * seconds(epoch, step)[p], 3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for p in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return found


def rows_of(step):
    return sum([part.batch.groups.tolist() for part in step], [])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kind", "devices", "block_size", "batch_size"),
    [(Table, 1, 1, 10), (Table, 2, 2, 13), (Numbers, 1, 3, 10), (Table, 3, 1, 43)],
)
def test_batches_are_those_of_equal_parts(order, kind, devices, block_size, batch_size):
    if order == "global" and kind is Numbers:
        return
    alone = Loader(kind(SIZES), batch_size, **ORDERS[order])
    wanted = [batch.groups.tolist() for _ in range(3) for batch in alone]
    shares = shares_of(3, devices, block_size, every=2)
    parts = run(shares, batch_size, 3, lambda *_: (1.0, 4.0, 1.5), kind, order=order)
    steps = list(zip(*parts, strict=True))
    assert [rows_of(step) for step in steps] == wanted
    room = shares[0].room(batch_size) * block_size
    for step in steps:
        starts = np.cumsum([0, *(part.batch.size for part in step)]).tolist()
        assert [part.first_row for part in step] == starts[:-1]
        assert {part.global_rows for part in step} == {starts[-1]}
        assert {part.examples for part in step} == {room}
        for part in step:
            assert part.dealt == -(-part.batch.size // devices) <= room
            blocks = part.batch.size / (devices * block_size)
            last = part.first_row + part.batch.size == part.global_rows
            assert blocks == int(blocks) or last


def sizes_of(parts):
    return np.array([[part.batch.size for part in of_one] for of_one in parts])


def test_a_slow_process_gets_less_and_its_share_back():
    def seconds(epoch, step):
        return (1.0, 4.0 if epoch < 4 else 1.0)

    shares = shares_of(2, every=1)
    parts = run(shares, 20, 12, seconds, sizes=[100])
    sizes = sizes_of(parts)
    assert (sizes.sum(0) == 20).all()
    assert sizes[:, 0].tolist() == [10, 10]  # nothing was measured
    assert sizes[:, 12:20].tolist() == [[16] * 8, [4] * 8]
    assert sizes[:, -5:].tolist() == [[10] * 5] * 2
    assert (shares[0].counts == shares[1].counts).all()
    assert shares[0].expected().tolist() == [1, 1]


def test_nobody_starves():
    """Who reports nothing while it has no block has one again after `patience`."""
    shares = shares_of(2, every=1, balance=Balance(patience=6))
    sizes = []

    def work(p):
        for part in Loader(Table([4 * 60]), 4, share=shares[p], prefetch=1):
            if p == 1:
                sizes.append(part.batch.size)
            if size := part.batch.size:
                shares[p].observe((1.0, 1000.0)[p] * size, size)

    threads = [threading.Thread(target=work, args=(p,)) for p in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes[0] == 2 and 0 in sizes
    given = np.flatnonzero(sizes)
    # five batches may be on their way when it is given one
    assert len(given) > 5 and np.diff(given).max() <= 6 + 1 + 5


def test_a_process_without_measurements_is_taken_for_average():
    shares = shares_of(3, every=1)
    shares[0].observe(1.0, 1)
    shares[1].observe(3.0, 1)
    sizes = sizes_of(run(shares, 24, 1, lambda *_: (1, 3, 2), sizes=[24]))
    assert sizes[:, 0].tolist() == [13, 4, 7]


def test_loops_that_were_left_differently_go_on_alike():
    """As if one process had heard of the others' figures, and the other not any more."""
    shares = shares_of(2, every=4)
    shares[0]._schedule.observe([1.0, 7.0], [1, 1])
    parts = run(shares, 16, 1, lambda *_: (1, 7), sizes=[48])
    assert sizes_of(parts).tolist() == [[14] * 3, [2] * 3]


def test_leaving_a_loop_ends_the_wait_for_others():
    closed = threading.Event()

    class Alone:
        rounds = 0

        def exchange(self, value):
            self.rounds += 1
            if self.rounds > 2:
                assert closed.wait(20)
                raise RuntimeError("closed")
            return [value, json.dumps([0, 0]).encode()]

        def close(self):
            closed.set()

    share = BlockShare(Share(0, 2), 1, every=1, connect=Alone)
    for part in Loader(Table(SIZES), 10, share=share):
        assert part.batch.size == 5
        break
    assert closed.is_set()


def test_bad_lines_are_counted_with_process_0():
    class Bad(Numbers):
        def chunks(self, start_chunk=0):
            for chunk in super().chunks(start_chunk):
                yield type(chunk)(**{**vars(chunk), "bad_lines": 2})

    shares = shares_of(2, every=1)
    for share in shares:
        share._schedule.observe([1e9, 1.0], [1, 1])
    parts = run(shares, 10, 1, lambda *_: (1e9, 1.0), Bad)
    assert sizes_of(parts)[0].sum() < 10
    assert sum(part.batch.bad_lines for part in parts[0]) == 16
    assert sum(part.batch.bad_lines for part in parts[1]) == 0


def test_no_more_batches_are_read_at_once_than_are_cut_alike():
    shares = shares_of(2, every=2)
    sources = []

    class Noted(Table):
        rows_at_once = 1000

        def __init__(self, sizes):
            super().__init__(sizes)
            sources.append(self)

    run(shares, 4, 1, lambda *_: (1, 1), Noted, sizes=[40])
    assert {max(source.taken) for source in sources} == {4}


def test_refusals():
    share = Share(0, 2, devices=4)
    with pytest.raises(
        TypeError, match="`share` must be a Share, got tuple. Give Share"
    ):
        BlockShare((0, 2), 1)
    with pytest.raises(ValueError, match="`block_size` must be at least 1, got 0"):
        BlockShare(share, 0)
    with pytest.raises(ValueError, match="`most` must be at least 1, got 0"):
        BlockShare(share, 1, most=0)
    with pytest.raises(ValueError, match="`every` must be at least 1, got 0"):
        BlockShare(share, 1, every=0)
    few = BlockShare(share, 16, most=7)
    message = "`most` must let 2 processes take the 16 blocks of a batch of 1024, got 7. Give 8"
    with pytest.raises(ValueError, match=message):
        Loader(Table(SIZES), 1024, share=few)
    with pytest.raises(TypeError, match="`blocks` must be an integer, got 1.5"):
        few.observe(1.0, 1.5)
    with pytest.raises(
        ValueError, match="`seconds` must be finite and positive, got 0"
    ):
        few.observe(0.0, 2)
    with pytest.raises(
        ValueError, match="`seconds` must be finite and positive, got nan"
    ):
        few.observe(float("nan"), 2)
    few.observe(0.0, 0)  # nothing to do, no time


def test_equal_parts_have_no_dealing_of_their_own():
    [alone] = [Loader(Table(SIZES), 10, share=Share(0, 1))]
    _, [parts] = epoch_of([alone])
    assert {part.dealt for part in parts} == {None}

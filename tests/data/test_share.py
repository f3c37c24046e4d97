"""Shares of processes: nothing lost or doubled, the same batches for any number of them."""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from shardjax.data import (
    Batch,
    InMemory,
    Loader,
    Part,
    Share,
    Synthetic,
    criteo,
    parquet,
    row_range,
    share_of,
)


class Numbers:
    """A source whose labels and groups are the rows' numbers; notes what is read."""

    feature_names = ("item",)
    n_dense = 1

    def __init__(self, sizes):
        self.sizes = sizes
        self.read = 0

    def chunks(self, start_chunk=0):
        firsts = np.cumsum([0, *self.sizes])
        for number in range(start_chunk, len(self.sizes)):
            rows = np.arange(self.sizes[number]) + firsts[number]
            self.read += len(rows)
            yield batch_of(rows)


class Table(Numbers):
    """The same with rows by number, and chunks of known sizes."""

    rows_at_once = 10

    def __init__(self, sizes):
        super().__init__(sizes)
        self.taken = []

    def chunk_sizes(self):
        return self.sizes

    def row_count(self):
        return sum(self.sizes)

    def take(self, index):
        assert len(index) == 0 or 0 <= min(index) <= max(index) < sum(self.sizes)
        self.taken.append(len(index))
        return batch_of(index)


def batch_of(rows):
    return Batch(rows, rows[:, None], rows[None], ("item",), groups=rows)


ORDERS = {
    "none": {},
    "window": {"shuffle_seed": 3, "shuffle_rows": 20},
    "global": {"shuffle_seed": 3, "shuffle_rows": 20, "shuffle": "global"},
}
SIZES = [7, 0, 12, 5, 9, 1, 8, 1]  # 43 rows


def loaders(kind, sizes, batch_size, processes, devices=1, **options):
    return [
        Loader(kind(sizes), batch_size, share=Share(p, processes, devices), **options)
        for p in range(processes)
    ]


def epoch_of(loaders):
    """The rows of each global batch of an epoch, and the parts of each process."""
    parts = [list(loader) for loader in loaders]
    assert len({len(part) for part in parts}) == 1
    batches = []
    for step in zip(*parts, strict=True):
        assert len({part.global_rows for part in step}) == 1
        rows = [part.batch.groups.tolist() for part in step]
        starts = np.cumsum([0, *map(len, rows)]).tolist()
        assert [part.first_row for part in step] == starts[:-1]
        for part in step:
            assert part.batch.feature_names == ("item",)
            assert part.batch.dense.shape == (part.batch.size, 1)
        batches.append(sum(rows, []))
        assert len(batches[-1]) == step[0].global_rows
    return batches, parts


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [Numbers, Table])
@pytest.mark.parametrize("batch_size", [1, 8, 10, 43, 100])
def test_batches_do_not_depend_on_processes(order, kind, batch_size):
    if order == "global" and kind is Numbers:
        return
    options = ORDERS[order]
    alone = Loader(kind(SIZES), batch_size, **options)
    epochs = [[batch.groups.tolist() for batch in alone] for _ in range(2)]
    assert [sorted(sum(rows, [])) for rows in epochs] == [list(range(43))] * 2
    assert (epochs[0] != epochs[1]) == (order != "none")
    for processes, devices in ((1, 1), (1, 4), (2, 1), (3, 2), (4, 1), (50, 1)):
        several = loaders(kind, SIZES, batch_size, processes, devices, **options)
        for epoch in epochs if processes < 50 else epochs[:1]:
            batches, parts = epoch_of(several)
            assert batches == epoch
        each = devices * -(-batch_size // (processes * devices))
        sizes = [part.batch.size for of_one in parts for part in of_one]
        assert max(sizes) <= each
        for of_one in parts:
            # All but the last batch are full, and cut at the same rows.
            assert len({part.first_row for part in of_one[:-1]}) <= 1
        states = {json.dumps(loader.get_state()) for loader in several}
        assert len(states) == 1
        if processes < 50:
            assert states == {json.dumps(alone.get_state())}


@pytest.mark.parametrize("order", ORDERS)
def test_only_own_rows_are_read(order):
    several = loaders(Table, SIZES, 10, 3, **ORDERS[order])
    epoch_of(several)
    assert [loader.source.read for loader in several] == [0, 0, 0]
    assert sum(sum(loader.source.taken) for loader in several) == 43
    # No more rows at once than asked for, so that memory is bounded.
    assert max(max(loader.source.taken) for loader in several) <= 10


def test_rows_at_once_are_bounded_by_shuffle_rows():
    source = Table([1000])
    source.rows_at_once = 500
    options = ORDERS["global"] | {"shuffle_rows": 200}
    assert len(list(Loader(source, 30, **options))) == 34
    assert max(source.taken) == 180  # six batches
    assert sum(source.taken) == 1000


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(sum),
    batch_size=st.integers(1, 9),
    order=st.sampled_from(sorted(ORDERS)),
    drop_last=st.booleans(),
    processes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
def test_resume_with_other_processes(
    sizes, batch_size, order, drop_last, processes, data
):
    if drop_last:
        batch_size = min(batch_size, sum(sizes))
    options = ORDERS[order] | {"drop_last": drop_last}
    alone = Loader(Table(sizes), batch_size, **options)
    everything = [batch.groups.tolist() for batch in alone]
    before, after = (loaders(Table, sizes, batch_size, p, **options) for p in processes)
    stop = data.draw(st.integers(1, len(everything)))
    for loader in before:
        for _ in loader:
            if loader.batches == stop:
                break
    state = json.loads(json.dumps(before[0].get_state()))
    for loader in after:
        loader.set_state(state)
        assert loader.get_state() == state
    assert epoch_of(after)[0] == everything[stop:]
    assert epoch_of(after)[0] == [batch.groups.tolist() for batch in alone]
    assert len({loader.dropped_rows for loader in after}) == 1


def test_a_state_of_another_shuffle_is_refused():
    windows = Loader(Table([9]), 4, **ORDERS["window"])
    everywhere = Loader(Table([9]), 4, **ORDERS["global"])
    assert "shuffle" not in windows.get_state()
    with pytest.raises(ValueError, match="`shuffle` must .*, 'window', got 'global'"):
        everywhere.set_state(windows.get_state())
    with pytest.raises(ValueError, match="`shuffle` must .*, 'global', got 'window'"):
        windows.set_state(everywhere.get_state())
    # How many rows are read at once has no say in the order.
    options = ORDERS["global"] | {"shuffle_rows": 3}
    Loader(Table([9]), 4, **options).set_state(everywhere.get_state())


def test_a_state_beyond_the_rows_is_refused():
    loader = Loader(Table([10]), 4, **ORDERS["global"])
    for _ in loader:
        if loader.batches == 2:
            break
    again = Loader(Table([5]), 4, **ORDERS["global"])
    again.set_state(loader.get_state())
    with pytest.raises(ValueError, match="after row 8 of an epoch of 5 rows. The data"):
        list(again)


def test_bad_lines_are_counted_once_over_all():
    class Bad(Numbers):
        def chunks(self, start_chunk=0):
            for chunk in super().chunks(start_chunk):
                yield Batch(**{**vars(chunk), "bad_lines": 2})

    several = loaders(Bad, SIZES, 10, 2)
    _, parts = epoch_of(several)
    assert [loader.bad_lines for loader in several] == [16, 16]
    # With the part that has the first row of the batch.
    assert sum(part.batch.bad_lines for part in parts[0]) == 16
    assert sum(part.batch.bad_lines for part in parts[1]) == 0


def test_the_map_gets_parts():
    loader = Loader(Table([10]), 4, share=Share(1, 2), map=lambda part: part)
    for part in loader:
        assert isinstance(part, Part)
    many = Loader(Table([10]), 4, share=Share(1, 2), map=list, window=2)
    assert [part.batch.groups.tolist() for part in many] == [[2, 3], [6, 7], []]


def test_reading_everything_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        list(Loader(Numbers([5]), 2, share=Share(0, 2)))
    assert [r.getMessage().split(",")[0] for r in caplog.records] == [
        "each of 2 processes reads all rows and keeps its part"
    ]
    caplog.clear()
    Loader(Numbers([5]), 2, share=Share(0, 1))
    Loader(Table([5]), 2, share=Share(0, 2))
    assert not caplog.records


def test_empty_sources_are_an_error_in_every_process():
    for loader in loaders(Table, [0, 0], 4, 2, **ORDERS["global"]):
        with pytest.raises(ValueError, match="must give at least one batch an epoch"):
            list(loader)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((2, 2), ValueError, "`process` must be below `processes`, .* got 2 of 2"),
        ((-1, 2), ValueError, "`process` must be at least 0, got -1"),
        ((0, 0), ValueError, "`processes` must be at least 1, got 0"),
        ((0, 1, 0), ValueError, "`devices` must be at least 1, got 0"),
        ((0.5, 1), TypeError, "`process` must be an integer, got 0.5"),
    ],
)
def test_shares_that_are_none(arguments, error, message):
    with pytest.raises(error, match=message):
        Share(*arguments)
    if len(arguments) == 2:
        with pytest.raises(error, match=message):
            share_of(Numbers([5]), *arguments)


def test_options_that_do_not_fit():
    with pytest.raises(
        TypeError, match="`share` must be a Share, got tuple. Give Share"
    ):
        Loader(Table([5]), 2, share=(0, 2))
    with pytest.raises(
        ValueError, match="`shuffle` must be 'window' or 'global', got 'x'"
    ):
        Loader(Table([5]), 2, shuffle="x")
    with pytest.raises(ValueError, match="shuffle='global' needs a `shuffle_seed`"):
        Loader(Table([5]), 2, shuffle="global")
    with pytest.raises(
        TypeError, match="rows can be had by number .* Wrap it in InMem"
    ):
        Loader(Numbers([5]), 2, shuffle="global", shuffle_seed=0)
    Loader(InMemory(Numbers([5])), 2, shuffle="global", shuffle_seed=0)


def rows_of(source):
    return [chunk.groups.tolist() for chunk in source.chunks()]


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", [Numbers, Table])
def test_shares_of_a_source_are_all_of_it(kind, processes):
    shares = [share_of(kind(SIZES), p, processes) for p in range(processes)]
    rows = [sum(rows_of(share), []) for share in shares]
    assert sorted(sum(rows, [])) == list(range(43))
    for share in shares:
        chunks = rows_of(share)
        assert [chunk.groups.tolist() for chunk in share.chunks(1)] == chunks[1:]
        assert (share.feature_names, share.n_dense) == (("item",), 1)
    if kind is Table:
        assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_shares_of_files(tmp_path):
    for i in range(5):
        lines = [f"1\t{i}" + "\t" * 38 for _ in range(i + 1)]
        (tmp_path / f"{i}.tsv").write_text("\n".join(lines) + "\n")
        at = pa.array([i] * (i + 1))
        pq.write_table(pa.table({"label": at, "g": at}), tmp_path / f"{i}.parquet")
    text = criteo(tmp_path / "*.tsv", dense_transform="none")
    table = parquet(tmp_path / "*.parquet", label="label", group="g")
    for source in (text, table):
        shares = [share_of(source, p, 2) for p in range(2)]
        assert [len(share.files) for share in shares] == [3, 2]
        sizes = [sum(c.size for c in share.chunks()) for share in shares]
        assert sizes == [1 + 3 + 5, 2 + 4]
    assert table.row_count() == 15
    assert [share_of(table, p, 2).row_count() for p in range(2)] == [9, 6]
    # More processes than files: by rows, or by chunks.
    assert [share_of(table, p, 6).row_count() for p in range(6)] == [2, 3, 2, 3, 2, 3]
    sizes = [sum(c.size for c in share_of(text, p, 6).chunks()) for p in range(6)]
    assert sizes == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("order", ORDERS)
def test_sources_of_the_library(order, tmp_path):
    synthetic = Synthetic(rows=300, chunk_rows=70, vocabulary=(1000,), n_dense=1)
    kept = Batch.concat(list(synthetic.chunks()))
    path = tmp_path / "a.parquet"
    data = {"label": kept.labels, "x": kept.dense[:, 0], "k": kept.fixed[0]}
    pq.write_table(pa.table(data), path, row_group_size=90)
    options = {"dense": ["x"], "categorical": ["k"]}
    table = parquet(path, label="label", chunk_rows=40, **options)
    sources = [synthetic, InMemory(synthetic), table, row_range(table, 10, 290)]
    for source in sources:

        def all_of(share=None, source=source):
            loader = Loader(source, 64, share=share, **ORDERS[order])
            return [part if share is None else part.batch for part in loader]

        whole = Batch.concat(all_of())
        steps = zip(*[all_of(Share(p, 3)) for p in range(3)], strict=True)
        joined = Batch.concat([batch for step in steps for batch in step])
        np.testing.assert_array_equal(joined.fixed, whole.fixed)
        np.testing.assert_array_equal(joined.dense, whole.dense)
        if source is not sources[-1]:
            np.testing.assert_array_equal(
                np.sort(whole.fixed[0]), np.sort(kept.fixed[0])
            )

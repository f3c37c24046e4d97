"""The arena of the RAM tier."""

import numpy as np
import pytest

from shardjax.embed.host_rows import FREE, HostRows

WORDS = 5


def filled(n: int) -> HostRows:
    """An arena of n rows, each with its number in all words."""
    host = HostRows(WORDS)
    rows = host.take(n)
    host.records[rows] = np.arange(n)[:, None]
    host.headers["key"][rows] = np.arange(n)
    host.headers["table"][rows] = np.arange(n) % 3
    return host


@pytest.mark.parametrize("seed", range(5))
def test_an_arena_that_shrinks_keeps_its_rows(seed):
    rng = np.random.default_rng(seed)
    host = filled(1000)
    gone = rng.permutation(1000)[:700]
    host.release(gone.astype(np.int32))
    where = {n: n for n in range(1000) if n not in set(gone.tolist())}
    keys, tables, rows = host.shrink(0)
    assert host.bytes == 300 * host.row_bytes
    for key, table, row in zip(keys.tolist(), tables, rows.tolist(), strict=True):
        assert table == key % 3
        where[key] = row
    assert sorted(where.values()) == list(range(300))
    for key, row in where.items():
        assert (host.records[row] == key).all()
        assert host.headers["key"][row] == key
    more = host.take(200)
    assert sorted(more.tolist()) == list(range(300, 500))


def test_rows_on_their_way_or_about_to_leave_stay_where_they_are():
    host = filled(1000)
    host.headers["flight"][600] = 3
    host.headers["table"][500] = FREE  # leaves for good, and may still be read
    host.release(np.r_[0:400, 700:1000].astype(np.int32))
    keys, _, rows = host.shrink(0)
    assert host.bytes == 601 * host.row_bytes
    assert set(keys.tolist()) == set(range(601, 700))
    assert set(rows.tolist()) == set(range(99))
    assert host.headers["flight"][600] == 3
    assert len(host) == 300


def test_a_little_is_not_worth_the_while():
    host = filled(1000)
    host.release(np.arange(980, 1000, dtype=np.int32))
    assert len(host.shrink(0)[0]) == 0
    assert host.bytes == 1000 * host.row_bytes
    host.release(np.arange(960, 980, dtype=np.int32))
    assert len(host.shrink(0)[0]) == 0  # nobody has to move
    assert host.bytes == 960 * host.row_bytes

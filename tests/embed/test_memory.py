from pathlib import Path

import numpy as np
import pytest

from shardjax.embed import memory


@pytest.mark.parametrize("can", [True, False])
def test_memory_reads_as_zeros_and_is_written_to(monkeypatch, can):
    monkeypatch.setattr(memory, "can_reserve", can)
    array = memory.reserve((1000, 3), np.int32)
    assert array.shape == (1000, 3)
    assert array.dtype == np.int32
    assert not array.any()
    array[999] = 7
    assert array.sum() == 21
    assert memory.reserve((0, 3), np.int32).shape == (0, 3)


def test_more_may_be_reserved_than_there_is():
    spaces = [memory.reserve((2**31, 2), np.uint64) for _ in range(200)]  # 6 TiB
    for space in spaces:
        space[-1] = 5
        assert not space[0].any()


def resident() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [x for x in lines if x.startswith("RssAnon")]
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells")
def test_memory_that_is_given_back_is_not_resident():
    array = memory.reserve((100_000, 100), np.int64)
    before = resident()
    array[:50_000] = 1
    assert resident() - before > 39_000_000
    memory.give_back(array, 10_000, 50_000)
    assert resident() - before < 12_000_000
    assert (array[:10_000] == 1).all()
    assert not array[10_100:49_900].any()
    array[20_000] = 7
    assert array[20_000].sum() == 700


def test_memory_that_was_not_reserved_is_kept():
    array = np.ones((1000, 3))
    memory.give_back(array, 0, 1000)
    assert array.all()

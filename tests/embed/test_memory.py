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

"""What requesters ask owners for."""

import numpy as np
import pytest

from shardjax.embed.messages import lay_out, read_keys, write_keys
from shardjax.embed.span import DeviceSpan


@pytest.mark.parametrize("amounts", [0, 1, 2])
def test_keys_arrive_by_requester_owner_and_place(amounts):
    rng = np.random.default_rng(0)
    requesters, owners, tables, room = 3, 4, 2, 50
    _, block = lay_out([(1, 5, 1), (tables, room, amounts)])
    messages = np.zeros((requesters, owners, block.end + 7), np.int32)
    sent = {}
    for r in range(requesters):
        used = np.zeros(owners, np.int64)
        for t in range(tables):
            n = int(rng.integers(0, 25))
            keys = rng.integers(0, 2**64, n, np.uint64)
            own = rng.integers(0, owners, n).astype(np.int32)
            counts, scores = rng.integers(0, 2**32, (2, n))
            write_keys(block, t, keys, own, counts, scores, used, messages[r])
            order = np.argsort(own, kind="stable")
            sent[r, t] = keys[order], counts[order], scores[order]
    received = messages.transpose(1, 0, 2)
    for t in range(tables):
        found = read_keys(block, t, received, in_turn=False)
        parts = [sent[r, t] for r in range(requesters)]
        assert found.lengths.tolist() == [len(keys) for keys, *_ in parts]
        np.testing.assert_array_equal(
            found.values, np.concatenate([p[0] for p in parts])
        )
        for n, name in enumerate(("counts", "scores"), 1):
            got = getattr(found, name)
            if amounts < n:
                assert got is None
            else:
                np.testing.assert_array_equal(
                    got, np.concatenate([p[n] for p in parts])
                )


def test_lists_that_are_dealt_in_turn_come_in_order():
    [block] = lay_out([(2, 4, 1)])
    messages = np.zeros((1, 3, block.end), np.int32)
    used = np.zeros(3, np.int64)
    lists = [np.arange(5, dtype=np.uint64) + 2**40, np.arange(4, dtype=np.uint64)]
    dealt = 0
    for t, keys in enumerate(lists):
        turn = ((dealt + np.arange(len(keys))) % 3).astype(np.int32)
        counts = np.arange(len(keys)) + 1
        write_keys(block, t, keys, turn, counts, counts, used, messages[0])
        dealt += len(keys)
    for t, keys in enumerate(lists):
        found = read_keys(block, t, messages.transpose(1, 0, 2), in_turn=True)
        np.testing.assert_array_equal(found.values, keys)
        assert found.counts is not None
        np.testing.assert_array_equal(found.counts, np.arange(len(keys)) + 1)


def test_devices_of_a_process_must_follow_one_another():
    assert DeviceSpan._of_numbers([4, 5], 8, 1) == DeviceSpan(8, 4, 2)
    for own in ([0, 2], []):
        with pytest.raises(
            ValueError, match=r"must follow one another .* for process 1"
        ):
            DeviceSpan._of_numbers(own, 8, 1)

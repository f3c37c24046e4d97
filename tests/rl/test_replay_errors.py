"""What a replay refuses, and that nothing has changed then."""

import numpy as np
import pytest

from shardjax import rl

EXAMPLE = {"obs": np.zeros(3, np.float32), "action": np.int32(0)}


def items(n):
    return {"obs": np.zeros((n, 3), np.float32), "action": np.zeros(n, np.int32)}


def test_an_empty_replay_has_nothing_to_draw():
    replay = rl.Replay(EXAMPLE, 4)
    with pytest.raises(RuntimeError, match="no items to draw from: `add` some first"):
        replay.sample(2)
    replay.delete(replay.add(items(2)))
    with pytest.raises(RuntimeError, match="no items"):
        replay.sample(2)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1.0, 1e300])
@pytest.mark.parametrize("sampler", [rl.Proportional(alpha=1.0), rl.RankBased()])
def test_a_priority_is_a_finite_number_from_0_on(wrong, sampler):
    """A NaN in a tree of sums would end all draws (muzero-general #111)."""
    replay = rl.Replay(EXAMPLE, 4, sampler)
    ids = replay.add(items(3), [1.0, 2.0, 3.0])
    before = replay.state_dict()
    with pytest.raises(ValueError, match=r"for id 1 \(number 1 of 3\)"):
        replay.set_priorities(ids, [1.0, wrong, 3.0])
    with pytest.raises(ValueError, match="`priorities` of `add` must be finite"):
        replay.add(items(2), [1.0, wrong])
    after = replay.state_dict()
    for name in ("priorities", "ids", "next_id", "order"):
        np.testing.assert_array_equal(after[name], before[name])


def test_priorities_are_one_for_each_id():
    replay = rl.Replay(EXAMPLE, 4, rl.Proportional())
    ids = replay.add(items(3))
    with pytest.raises(ValueError, match=r"one for each item, \[3\], got \[2\]"):
        replay.set_priorities(ids, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"one for each item, \[3\], got \[\]"):
        replay.add(items(3), 1.0)


def test_uniform_draws_have_no_priorities():
    replay = rl.Replay(EXAMPLE, 4)
    ids = replay.add(items(3))
    with pytest.raises(ValueError, match="`set_priorities` got priorities, but"):
        replay.set_priorities(ids, np.ones(3))
    with pytest.raises(ValueError, match="`add` got priorities, but"):
        replay.add(items(3), np.ones(3))


def test_items_are_like_the_example():
    replay = rl.Replay(EXAMPLE, 4)
    with pytest.raises(ValueError, match="structure of the example"):
        replay.add({"obs": np.zeros((2, 3), np.float32)})
    wrong = {"obs": np.zeros((2, 4), np.float32), "action": np.zeros(2, np.float32)}
    with pytest.raises(ValueError, match="like the example") as caught:
        replay.add(wrong)
    text = str(caught.value)
    assert "['action'] must be int32, got float32" in text
    assert "['obs'] must be [n, 3], got [2, 4]" in text
    with pytest.raises(ValueError, match=r"\['action'\] 3, \['obs'\] 2"):
        replay.add({"obs": np.zeros((2, 3), np.float32), "action": np.zeros(3, int)})
    with pytest.raises(ValueError, match="must fit into int32, got 0 to 2147483648"):
        replay.add({"obs": np.zeros((2, 3)), "action": np.array([0, 2**31])})
    assert len(replay) == 0
    replay.add(
        {"obs": np.zeros((2, 3)), "action": np.array([0, 1])}
    )  # of one kind: cast
    assert len(replay) == 2


def test_an_example_has_arrays_of_numbers():
    with pytest.raises(ValueError, match="must have at least one array"):
        rl.Replay({}, 4)
    with pytest.raises(TypeError, match=r"\['name'\] of the example must be an array"):
        rl.Replay({"name": "a"}, 4)


def test_stale_ids_have_no_items():
    replay = rl.Replay(EXAMPLE, 4)
    ids = replay.add(items(6))
    with pytest.raises(KeyError, match="2 of 6 ids are stale, the first is 0"):
        replay.get(ids)
    with pytest.raises(KeyError, match="1 of 1 ids are stale"):
        replay.get([2**64 - 1])
    with pytest.raises(TypeError, match="uint64, got float64"):
        replay.get([0.5])
    with pytest.raises(TypeError, match="uint64, got int64"):
        replay.delete([-1])
    with pytest.raises(ValueError, match="as many as `ids`, 6, got 2"):
        replay.replace(ids, items(2))


def test_arguments_are_checked():
    for capacity in (0, 2**31):
        with pytest.raises(ValueError, match=f"`capacity` must be .* got {capacity}"):
            rl.Replay(EXAMPLE, capacity)
    with pytest.raises(TypeError, match="`sampler` must be Uniform"):
        rl.Replay(EXAMPLE, 4, rl.Proportional)
    with pytest.raises(ValueError, match='"batch", "buffer" or None, got \'mean\''):
        rl.Replay(EXAMPLE, 4, weight_norm="mean")
    with pytest.raises(ValueError, match="`first_id` must be from 0"):
        rl.Replay(EXAMPLE, 4, first_id=-1)
    replay = rl.Replay(EXAMPLE, 4)
    replay.add(items(2))
    with pytest.raises(ValueError, match="must be at least 1, got 0 and None"):
        replay.sample(0)
    with pytest.raises(ValueError, match="must be at least 1, got 2 and 0"):
        replay.sample(2, groups=0)
    with pytest.raises(ValueError, match="`beta` must be a finite number from 0 on"):
        replay.sample(2, beta=np.nan)
    for field in ("alpha", "eps"):
        with pytest.raises(ValueError, match=f"`{field}` of Proportional must be a"):
            rl.Proportional(**{field: -1.0})
    with pytest.raises(ValueError, match="`alpha` of RankBased"):
        rl.RankBased(alpha=np.inf)
    with pytest.raises(ValueError, match="`refresh` of RankBased must be at least 1"):
        rl.RankBased(refresh=0)
    with pytest.raises(
        ValueError, match="`uniform_prob` of Proportional must be from 0"
    ):
        rl.Proportional(uniform_prob=1.5)

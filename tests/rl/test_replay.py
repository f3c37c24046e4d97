"""What a replay in RAM draws, and what happens to items by id."""

import threading

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardjax import rl
from shardjax.rl.rank import rank_probabilities
from tests.rl.draws import assert_drawn

EXAMPLE = {"x": np.int64(0)}
SAMPLERS = {
    "uniform": rl.Uniform(),
    "proportional": rl.Proportional(alpha=0.6),
    "rank": rl.RankBased(alpha=0.7, refresh=1),
}
FIRST_IDS = (0, 2**31 - 3, 2**32 - 3, 2**63 - 3, 2**64 - 40)


def numbered(n, start=0):
    return {"x": np.arange(start, start + n)}


def filled(n, sampler, priorities=None, capacity=None, **options):
    replay = rl.Replay(EXAMPLE, capacity or n, sampler, **options)
    return replay, replay.add(numbered(n), priorities)


@pytest.fixture(params=SAMPLERS.values(), ids=SAMPLERS)
def sampler(request):
    return request.param


def probabilities_of(sampler, priorities):
    """The probability of each item, by the definitions."""
    n = len(priorities)
    match sampler:
        case rl.Uniform():
            return np.full(n, 1 / n)
        case rl.Proportional(alpha, eps, uniform_prob):
            masses = (priorities + eps) ** alpha
            total = masses.sum()
            share = masses / total if total else np.full(n, 1 / n)
            return (1 - uniform_prob) * share + uniform_prob / n
        case rl.RankBased(alpha, _):
            ranks = np.argsort(np.argsort(-priorities, kind="stable"))
            return rank_probabilities(n, alpha)[ranks]


def weights_of(probabilities, everything, beta, norm):
    """Importance weights of drawn items, by the definition."""
    weights = (len(everything) * probabilities) ** -beta
    if norm == "batch":
        weights /= weights.max(axis=-1, keepdims=True)
    elif norm == "buffer":
        weights /= ((len(everything) * everything[everything > 0]) ** -beta).max()
    return weights


@pytest.mark.parametrize("capacity", [1, 2, 3, 255, 256, 257, 1_000_000])
@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
def test_items_are_drawn_as_often_as_said(sampler, capacity, stratified):
    priorities = np.random.default_rng(0).lognormal(0, 1, capacity)
    given = None if sampler == rl.Uniform() else priorities
    replay, _ = filled(capacity, sampler, given, stratified=stratified)
    expected = probabilities_of(sampler, priorities)
    batch = replay.sample(1000, groups=200)
    np.testing.assert_array_equal(batch.items["x"], batch.ids)
    drawn = expected[batch.items["x"]]
    np.testing.assert_allclose(batch.probabilities, drawn, rtol=1e-12)
    assert_drawn(batch.items["x"], expected)


@pytest.mark.parametrize("norm", ["batch", "buffer", None])
@pytest.mark.parametrize("uniform_prob", [0.0, 0.1])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_weights_are_those_of_the_definition(norm, uniform_prob, eps):
    """By batch and by buffer differ (chainerrl #570); items that cannot be drawn have no
    weight that others could be divided by."""
    sampler = rl.Proportional(0.7, eps, uniform_prob)
    priorities = np.random.default_rng(1).lognormal(0, 2, 100)
    priorities[::10] = 0.0
    replay, ids = filled(100, sampler, priorities, weight_norm=norm, capacity=128)
    replay.delete(ids[50:60])
    kept = np.setdiff1d(np.arange(100), np.arange(50, 60))
    expected = np.zeros(100)
    expected[kept] = probabilities_of(sampler, priorities[kept])
    for beta in (0.0, 0.4, 1.0):
        batch = replay.sample(64, groups=5, beta=beta)
        drawn = expected[batch.items["x"]]
        np.testing.assert_allclose(batch.probabilities, drawn, rtol=1e-12)
        weights = weights_of(drawn, expected[kept], beta, norm)
        np.testing.assert_allclose(batch.weights, weights, rtol=1e-6)
        assert batch.weights.dtype == np.float32
    assert_drawn(replay.sample(100_000).items["x"], expected)


@pytest.mark.parametrize("norm", ["batch", "buffer", None])
def test_weights_by_rank_are_those_of_the_definition(norm):
    priorities = np.random.default_rng(1).lognormal(0, 2, 100)
    sampler = SAMPLERS["rank"]
    replay, _ = filled(100, sampler, priorities, weight_norm=norm)
    expected = probabilities_of(sampler, priorities)
    batch = replay.sample(64, groups=3, beta=0.5)
    weights = weights_of(expected[batch.items["x"]], expected, 0.5, norm)
    np.testing.assert_allclose(batch.weights, weights, rtol=1e-6)


def test_weighted_means_are_those_of_uniform_draws(sampler):
    """With beta = 1; whatever is thus estimated is not biased by priorities."""
    priorities = np.random.default_rng(3).lognormal(0, 1, 50)
    given = None if sampler == rl.Uniform() else priorities
    replay, _ = filled(50, sampler, given, weight_norm=None)
    batch = replay.sample(400_000, beta=1.0)
    values = np.sin(batch.items["x"])
    assert np.mean(batch.weights) == pytest.approx(1, abs=0.02)
    expected = np.sin(np.arange(50)).mean()
    assert np.mean(batch.weights * values) == pytest.approx(expected, abs=0.02)


def test_a_new_item_gets_the_largest_priority_there_is():
    """Of the items that are there: an outlier that has left counts no more
    (Kaixhin/Rainbow #13, pytorch/rl #2210), and it is not rounded (flashbax #58)."""
    replay, ids = filled(2, rl.Proportional(1.0, 0.0), [1e6, 0.3], capacity=3)
    replay.set_priorities(ids[:1], [0.7])
    replay.add(numbered(1, 2))
    np.testing.assert_allclose(
        np.unique(replay.sample(1000).probabilities), np.array([0.3, 0.7]) / 1.7
    )
    replay.delete(replay.add(numbered(1, 3), [50.0]))
    replay.add(numbered(1, 4))
    assert replay.stats()["max_priority"] == 0.7
    empty = rl.Replay(EXAMPLE, 4, rl.Proportional())
    empty.add(numbered(2))
    assert empty.stats()["max_priority"] == 1.0


def test_without_any_priority_draws_are_uniform():
    """Not NaN (dopamine #182), and not of slots without an item."""
    replay, ids = filled(20, rl.Proportional(1.0, 0.0), np.zeros(20), capacity=32)
    replay.delete(ids[5:10])
    batch = replay.sample(50_000, beta=1.0)
    expected = np.r_[np.full(5, 1 / 15), np.zeros(5), np.full(10, 1 / 15)]
    assert_drawn(batch.items["x"], expected)
    np.testing.assert_allclose(batch.probabilities, 1 / 15)
    assert (batch.weights == 1).all()
    replay.set_priorities(ids[:1], [2.0])
    assert (replay.sample(100).ids == ids[0]).all()


@pytest.mark.parametrize("name", ["proportional", "rank"])
def test_a_priority_of_an_item_that_is_gone_is_stale(name):
    """It does not land on the item that has its slot (ray #6534, cleanrl #511)."""
    sampler = SAMPLERS[name]
    replay, old = filled(8, sampler, np.ones(8))
    batch = replay.sample(8)
    new = replay.add(numbered(8, 8), np.full(8, 2.0))
    done = replay.set_priorities(batch.ids, np.full(8, 1e9))
    assert not done.applied.any() and done.stale.all()
    assert replay.stats()["max_priority"] == 2.0
    assert replay.stats()["stale"] == 8
    mixed = np.array([new[3], old[3], new[0], old[0]])
    done = replay.set_priorities(mixed, [5.0, 1e9, 3.0, 1e9])
    assert done.applied.tolist() == [True, False, True, False]
    state = replay.state_dict()
    assert state["priorities"].tolist() == [3.0, 2, 2, 5, 2, 2, 2, 2]


@pytest.mark.parametrize("first_id", FIRST_IDS)
def test_ids_are_64_bits(sampler, first_id):
    """The counter passes 2**31, 2**32 and 2**63, and wraps around slots on its way."""
    replay = rl.Replay(EXAMPLE, 5, sampler, first_id=first_id)
    all_ids = []
    for start in range(0, 24, 3):
        ids = replay.add(numbered(3, start))
        assert ids.dtype == np.uint64
        assert ids.tolist() == [first_id + start + i for i in range(3)]
        all_ids.extend(ids.tolist())
        live = all_ids[-5:]
        assert len(replay) == len(live)
        batch = replay.sample(40)
        drawn = batch.ids.tolist()
        assert set(drawn) <= set(live)
        assert [i - first_id for i in drawn] == batch.items["x"].tolist()
        assert replay.contains(np.array(all_ids, np.uint64)).tolist() == (
            [False] * (len(all_ids) - len(live)) + [True] * len(live)
        )


def test_ids_end_before_their_largest():
    replay = rl.Replay(EXAMPLE, 5, first_id=2**64 - 3)
    replay.add(numbered(2))
    with pytest.raises(OverflowError, match="none for 1 more items"):
        replay.add(numbered(1))


@pytest.mark.parametrize("n", [0, 4, 5, 6, 10, 13])
def test_any_number_of_items_can_be_added_at_once(sampler, n):
    """As many as fit, too (flashbax #40); of more the last stay."""
    replay, _ = filled(3, sampler, capacity=5)
    ids = replay.add(numbered(n, 3))
    live = list(range(3 + n))[-5:]
    assert ids.tolist() == list(range(3, 3 + n))
    assert len(replay) == len(live)
    assert set(replay.sample(200).items["x"].tolist()) == set(live)
    assert replay.get(np.array(live))["x"].tolist() == live


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("delete"), st.lists(st.integers(0, 60), max_size=5)),
        st.tuples(st.just("replace"), st.lists(st.integers(0, 60), max_size=5)),
        st.tuples(st.just("priorities"), st.lists(st.integers(0, 60), max_size=5)),
    ),
    max_size=15,
)


@given(CHANGES, st.sampled_from(list(SAMPLERS)), st.integers(1, 8))
@settings(max_examples=60)
def test_a_replay_is_a_dict_of_the_last_ids(changes, name, capacity):
    sampler = SAMPLERS[name]
    replay = rl.Replay(EXAMPLE, capacity, sampler, first_id=2**63 - 20)
    model, count = {}, 0
    for number, (what, value) in enumerate(changes):
        if what == "add":
            ids = replay.add(numbered(value, 1000 * number)).tolist()
            count += value
            model |= {i: [1000 * number + k, None] for k, i in enumerate(ids)}
            oldest = 2**63 - 20 + count - capacity
            model = {i: item for i, item in model.items() if i >= oldest}
            known = [p for _, p in model.values() if p is not None]
            for i, item in model.items():
                model[i] = (
                    [item[0], max(known, default=1.0)] if item[1] is None else item
                )
            continue
        ids = np.array([2**63 - 20 + i for i in value], np.uint64)
        there = [i in model for i in ids.tolist()]
        if what == "delete":
            done = replay.delete(ids)
            for i in ids.tolist():
                model.pop(i, None)
        elif what == "replace":
            done = replay.replace(ids, numbered(len(ids), 1000 * number))
            for k, i in enumerate(ids.tolist()):
                if i in model:
                    model[i][0] = 1000 * number + k
        elif sampler != rl.Uniform():
            priorities = np.arange(len(ids)) * 0.5 + number
            done = replay.set_priorities(ids, priorities)
            for i, p in zip(ids.tolist(), priorities, strict=True):
                if i in model:
                    model[i][1] = p
        else:
            continue
        assert done.applied.tolist() == there
        assert done.stale.tolist() == [not x for x in there]
    assert len(replay) == len(model)
    if not model:
        with pytest.raises(RuntimeError, match="no items to draw from"):
            replay.sample(1)
        return
    ids = np.array(list(model), np.uint64)
    assert replay.get(ids)["x"].tolist() == [x for x, _ in model.values()]
    batch = replay.sample(300)
    assert set(batch.ids.tolist()) <= set(model)
    assert batch.items["x"].tolist() == [model[i][0] for i in batch.ids.tolist()]
    if name == "proportional" and "priorities" in dict(changes):
        everything = np.array([p for _, p in model.values()])
        of_id = dict(zip(model, probabilities_of(sampler, everything), strict=True))
        np.testing.assert_allclose(
            batch.probabilities, [of_id[i] for i in batch.ids.tolist()], rtol=1e-9
        )


def test_of_an_id_given_twice_the_last_priority_counts():
    replay, ids = filled(4, rl.Proportional(1.0, 0.0), np.ones(4))
    done = replay.set_priorities(ids[[1, 2, 1]], [7.0, 2.0, 5.0])
    assert done.applied.all()
    assert replay.state_dict()["priorities"].tolist() == [1, 5, 2, 1]


def test_ranks_are_sorted_after_so_many_changes():
    replay, ids = filled(8, rl.RankBased(0.7, refresh=10), np.arange(8.0))
    first = rank_probabilities(8, 0.7)[0]

    def first_id():
        batch = replay.sample(200)
        return set(batch.ids[np.isclose(batch.probabilities, first)].tolist())

    assert first_id() == {ids[7]}  # put in last; 8 changes so far
    replay.set_priorities(ids[:1], [50.0])
    assert first_id() == {ids[7]}
    replay.set_priorities(ids[1:2], [40.0])
    assert first_id() == {ids[0]}
    [new] = replay.add(numbered(1), [0.1]).tolist()
    assert first_id() == {new}  # before it is sorted, a new item comes first


def test_strata_give_each_item_its_share():
    priorities = np.array([1.0, 2.0, 5.0])
    replay, _ = filled(3, rl.Proportional(1.0, 0.0), priorities)
    for _ in range(20):
        counts = np.bincount(replay.sample(80).items["x"], minlength=3)
        assert (abs(counts - 10 * priorities) <= 1).all()


def test_groups_are_batches_of_their_own():
    replay, _ = filled(50, rl.Proportional(), np.arange(50.0))
    batch = replay.sample(16, groups=4, beta=1.0)
    assert {x.shape for x in (*batch.items.values(), *batch[1:])} == {(4, 16)}
    np.testing.assert_array_equal(batch.weights.max(axis=1), np.ones(4))
    for group in batch.items["x"]:  # each has its own strata
        assert (np.diff(group) >= 0).all()
    assert len({tuple(group) for group in batch.items["x"].tolist()}) == 4


ITEM = {
    "small": {"flag": np.bool_(False), "half": np.zeros(3, ml_dtypes.bfloat16)},
    "none": np.zeros((2, 0), np.float32),
    "byte": np.int8(0),
    "large": np.zeros((5, 7, 3), np.float64),
    "pair": (np.uint64(0), np.zeros(16, np.float32)),
}


def test_items_are_any_pytree_of_numbers():
    rng = np.random.default_rng(0)
    replay = rl.Replay(ITEM, 40, first_id=7)

    def some(n):
        return jax.tree.map(
            lambda x: rng.integers(0, 100, (n, *np.shape(x))).astype(x.dtype), ITEM
        )

    parts = [some(n) for n in (30, 25)]
    ids = np.concatenate([replay.add(part) for part in parts])
    items = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    batch = replay.sample(64, groups=2)
    at = (batch.ids - ids[0]).astype(np.int64)
    got = (batch.items, replay.get(ids[-40:]))
    for found, rows in zip(got, (at, np.arange(15, 55)), strict=True):
        assert jax.tree.structure(found) == jax.tree.structure(ITEM)
        for x, whole in zip(
            jax.tree.leaves(found), jax.tree.leaves(items), strict=True
        ):
            assert x.dtype == whole.dtype and x.flags.c_contiguous
            np.testing.assert_array_equal(x, whole[rows])


def test_what_is_drawn_belongs_to_whoever_draws():
    replay, ids = filled(4, rl.Uniform())
    batch = replay.sample(4)
    for column in batch.items.values():
        column[:] = -1
    assert replay.get(ids)["x"].tolist() == [0, 1, 2, 3]
    kept = replay.get(ids)["x"]
    replay.add(numbered(4, 10))
    assert kept.tolist() == [0, 1, 2, 3]


def test_actors_may_add_while_a_learner_draws():
    """Each item stays whole, and priorities go to the items they are for."""
    example = {"x": np.int64(0), "copy": np.zeros(100, np.int64)}
    replay = rl.Replay(example, 200, rl.Proportional(1.0, 0.0))

    def items(start):
        x = np.arange(start, start + 10)
        return {"x": x, "copy": np.repeat(x[:, None], 100, 1)}

    replay.add(items(0), np.ones(10))

    def act(first):
        for start in range(first, first + 2000, 10):
            replay.add(items(start), np.ones(10))

    actors = [threading.Thread(target=act, args=(10_000 * (i + 1),)) for i in range(3)]
    for actor in actors:
        actor.start()
    applied = 0
    for _ in range(300):
        batch = replay.sample(32)
        np.testing.assert_array_equal(
            batch.items["copy"], np.repeat(batch.items["x"][:, None], 100, 1)
        )
        applied += replay.set_priorities(batch.ids, np.full(32, 2.0)).applied.sum()
    for actor in actors:
        actor.join()
    stats = replay.stats()
    assert stats["inserted"] == 6010 and stats["updated"] == applied
    assert stats["updated"] + stats["stale"] == stats["sampled"] == 9600


def test_counts():
    replay, ids = filled(4, rl.Proportional(), np.arange(4.0))
    replay.sample(6, groups=2)
    replay.set_priorities(ids[:2], [1.0, 7.0])
    replay.add(numbered(2))
    replay.set_priorities(ids[:3], np.ones(3))
    replay.delete(ids[2:3])
    assert replay.stats() == {
        "size": 3,
        "capacity": 4,
        "inserted": 6,
        "sampled": 12,
        "deleted": 1,
        "updated": 3,
        "stale": 2,
        "samples_per_insert": 2.0,
        "max_priority": 7.0,
    }

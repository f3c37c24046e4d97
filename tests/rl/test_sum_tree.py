"""The tree of the host and that of a device, by the same tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardjax.rl import device_tree
from shardjax.rl.sum_tree import WIDTH, SumTree, climb, lay_out, slot_of_largest
from tests.rl.draws import assert_drawn

CAPACITIES = (1, 2, 3, 255, 256, 257, 1_000_000)
assert WIDTH**2 == device_tree.WIDTH**2 == 256


class HostTree:
    precision = 1e-14

    def __init__(self, capacity):
        self.tree = SumTree(capacity)
        self.rng = np.random.default_rng(capacity)

    def set(self, slots, masses):
        self.tree.set(np.asarray(slots, np.int64), np.asarray(masses, np.float64))

    def draw(self, n):
        return self.tree.find(self.rng.random(n) * self.tree.total)

    @property
    def total(self):
        return self.tree.total

    @property
    def masses(self):
        return self.tree.masses


set_leaves = jax.jit(device_tree.set_leaves, donate_argnums=0)


@partial(jax.jit, static_argnums=2)
def draw(levels, key, n):
    points = device_tree.random_points(key, levels, n, stratified=False)
    return device_tree.sample_leaves(levels, points)


class DeviceTree:
    precision = 3e-7

    def __init__(self, capacity):
        self.levels = device_tree.init_levels(capacity)
        self.capacity, self.key = capacity, jax.random.key(capacity)

    def set(self, slots, masses):
        slots, masses = jnp.asarray(slots, jnp.int32), jnp.asarray(masses, jnp.float32)
        self.levels = set_leaves(self.levels, slots, masses)

    def draw(self, n):
        self.key, key = jax.random.split(self.key)
        return np.asarray(draw(self.levels, key, n))

    @property
    def total(self):
        return float(device_tree.total(self.levels))

    @property
    def masses(self):
        return np.asarray(self.levels[0]).reshape(-1)[: self.capacity]


@pytest.fixture(params=[HostTree, DeviceTree], ids=["host", "device"])
def kind(request):
    return request.param


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_draws_are_in_proportion_to_masses(kind, capacity):
    tree, rng = kind(capacity), np.random.default_rng(1)
    masses = rng.lognormal(0, 1, capacity)
    if capacity > 3:
        masses[rng.random(capacity) < 0.3] = 0.0
    tree.set(np.arange(capacity), masses)
    exact = np.asarray(tree.masses, np.float64).sum()
    assert tree.total == pytest.approx(exact, rel=tree.precision)
    assert_drawn(tree.draw(300_000), tree.masses)


def test_a_lone_mass_is_always_drawn(kind):
    """Whatever lies around it, and wherever it is."""
    tree = kind(257)
    for slot in (0, 15, 16, 255, 256):
        tree.set([slot], [1e-3])
        assert (tree.draw(1000) == slot).all()
        tree.set([slot], [0.0])
        assert tree.total == 0.0


def test_small_masses_outlive_a_large_one(kind):
    """With sums to which differences are added, they would be 0, or the root negative."""
    tree = kind(257)
    tree.set(np.arange(257), np.full(257, 1e-3))
    tree.set([100], [1e20])
    assert (tree.draw(1000) == 100).all()
    tree.set([100], [1e-3])
    assert tree.total == pytest.approx(0.257, rel=tree.precision)
    assert_drawn(tree.draw(100_000), np.ones(257))


def test_a_change_of_many_masses_again_and_again_leaves_no_error(kind):
    """flashbax #52: after 1e5 changes of a tree that is mostly empty."""
    tree, rng = kind(4096), np.random.default_rng(0)
    for _ in range(100):
        slots = rng.choice(1000, 1000, replace=False) * 4
        tree.set(slots, rng.lognormal(0, 4, 1000))
    masses = np.asarray(tree.masses, np.float64)
    assert tree.total == pytest.approx(masses.sum(), rel=tree.precision)
    assert (masses[tree.draw(300_000)] > 0).all()


def test_points_at_the_ends_find_leaves_that_have_a_mass():
    tree = SumTree(300)
    tree.set(np.array([7, 200]), np.array([0.1, 0.2]))
    points = np.array([0.0, 0.1, tree.total, np.nextafter(tree.total, 1)])
    assert tree.find(points).tolist() == [7, 200, 200, 200]
    full = jnp.full(
        (3, 4), jnp.float32(1 - 2**-23)
    )  # the largest of jax.random.uniform
    levels = device_tree.set_leaves(
        device_tree.init_levels(300), jnp.array([7, 200]), jnp.array([0.1, 0.2])
    )
    assert device_tree.sample_leaves(levels[:2], full[:2]).tolist() == [200] * 4
    assert device_tree.sample_leaves(levels[:2], 0 * full[:2]).tolist() == [7] * 4


def test_points_of_strata_stay_below_1():
    levels = device_tree.init_levels(3)
    for key in range(2):
        points = device_tree.random_points(
            jax.random.key(key), levels, 100_000, stratified=True
        )
        assert points.max() < 1
        assert (jnp.diff(points[0]) > -1e-6).all()


@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6)), max_size=40),
)
@settings(max_examples=50)
def test_nodes_are_what_is_below_them(capacity, writes):
    """After any writes, repeated slots among them: the last counts."""
    tree = SumTree(capacity)
    largest, least = np.zeros_like(tree.nodes), np.zeros_like(tree.nodes)
    expected = np.zeros(capacity)
    for start in range(0, len(writes), 7):
        part = writes[start : start + 7]
        slots = np.array([s % capacity for s, _ in part], np.int64)
        masses = np.array([m for _, m in part], np.float64)
        tree.set(slots, masses)
        climb(tree.nodes, largest, tree.offsets, slots, False)
        climb(tree.nodes, least, tree.offsets, slots, True)
        for slot, mass in zip(slots, masses, strict=True):
            expected[slot] = mass
    np.testing.assert_array_equal(tree.masses, expected)
    nodes = tree.nodes.copy()
    tree.rebuild()
    np.testing.assert_array_equal(tree.nodes, nodes)
    assert tree.total == pytest.approx(expected.sum(), rel=1e-14)
    assert largest[-1] == expected.max()
    assert least[-1] == min((m for m in expected if m > 0), default=0)
    slot = slot_of_largest(tree.nodes, largest, tree.offsets)
    assert expected[slot] == expected.max()


def test_levels_are_whole_nodes():
    for capacity, levels in ((1, 2), (16, 2), (17, 3), (256, 3), (257, 4), (10**6, 6)):
        offsets = lay_out(capacity)
        assert len(offsets) == levels
        assert (offsets % WIDTH == 0).all()

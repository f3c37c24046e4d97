import pytest
from hypothesis import given, strategies as st

from shardjax.embed.growth import SMALL, homes_for, limit_for, space_for


@given(st.integers(0, 10**9))
def test_homes_suffice_and_are_not_more_than_keys_ask_for(count):
    homes = homes_for(count)
    assert count <= limit_for(homes) <= homes // 2
    assert homes <= max(count / 0.35, 2 * SMALL, 64)
    power = 1 << (homes.bit_length() - 1)
    assert count <= 0.7 * power or homes == power


@given(st.integers(SMALL, 10**9))
def test_one_key_more_is_five_homes_more_at_most(count):
    assert 0 <= homes_for(count + 1) - homes_for(count) <= 5


@pytest.mark.parametrize("homes", [64, SMALL, SMALL + 1, 10**9])
def test_what_overflows_has_room(homes):
    assert len(space_for(homes)) > homes - 1 + limit_for(homes)


def test_an_index_for_few_keys_is_small():
    assert space_for(homes_for(10)).nbytes < 2048

"""Priority tiers: named, validated, within BullMQ's range."""

import pytest

from studyhall.patterns.core.failures import Permanent
from studyhall.patterns.priority import Priority, UnknownPriority, priority_of

LOWEST = 2_097_151  # the last one that BullMQ takes


def test_tiers_are_in_order_in_range_and_never_zero():
    order = [Priority.CRITICAL, Priority.HIGH, Priority.NORMAL, Priority.LOW]
    assert order == sorted(order)
    assert all(0 < tier <= LOWEST for tier in order), "0 is served before every tier"


@pytest.mark.parametrize("tier", ["critical", "CRITICAL", 1, Priority.CRITICAL])
def test_a_tier_is_found_by_name_and_number(tier):
    assert priority_of(tier) is Priority.CRITICAL


@pytest.mark.parametrize("tier", ["urgent", "", 0, -1, 2, LOWEST + 1, True, None, 1.5, [], "x" * 10_000])
def test_anything_else_is_refused_with_the_list_of_tiers(tier):
    with pytest.raises(UnknownPriority, match="critical, high, normal, low") as refused:
        priority_of(tier)  # type: ignore[arg-type]
    assert isinstance(refused.value, Permanent)
    assert len(str(refused.value)) < 300

"""Medians and spreads are those of the rounds, and a ratio that the rounds do not support is not printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import UNSTABLE, Summary, percentile, ratio

rates = st.lists(st.floats(1, 1e6), min_size=1, max_size=9)


def test_a_ratio_whose_spread_exceeds_it_is_refused():
    steady = ratio([900, 1000, 1100], [500, 500, 500])
    assert steady is not None
    assert steady.stable
    assert str(steady) == "2.00 ×"
    noisy = ratio([1000, 1000, 4000], [500, 500, 500])  # 2, 2 and 8: a spread of 6 around 2
    assert noisy is not None
    assert not noisy.stable
    assert str(noisy) == UNSTABLE


def test_a_ratio_is_taken_round_by_round():
    """A machine that is slow for a whole round slows both sides."""
    shared = ratio([1000, 100, 500], [500, 50, 250])
    assert shared is not None
    assert shared.values == (2.0, 2.0, 2.0)
    assert shared.spread == 0


@pytest.mark.parametrize(("one", "other"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0]), ([1.0, 1.0], [1.0, 0.0])])
def test_no_ratio_without_a_round_on_both_sides(one, other):
    assert ratio(one, other) is None


@given(rates)
def test_the_median_lies_within_the_rounds_and_the_spread_is_their_width(values):
    summary = Summary(tuple(values))
    assert min(values) <= summary.median <= max(values)
    assert summary.spread == max(values) - min(values)


@given(rates, st.integers(1, 100))
def test_a_percentile_is_one_of_the_values_and_leaves_few_above_it(values, percent):
    value = percentile(values, percent)
    assert value in values
    assert sum(other > value for other in values) <= len(values) * (100 - percent) / 100


def test_known_percentiles():
    hundred = list(range(1, 101))
    assert [percentile(hundred, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 99) == 7.0

"""Delays are checked where they are written down."""

import math
from datetime import UTC, datetime

import pytest

from studyhall.patterns.delayed import InvalidDelay, after, at


def test_a_moment_needs_its_time_zone_and_a_delay_its_sense():
    assert after(hours=1, seconds=30) == 3630
    noon = datetime(2027, 1, 1, 12, tzinfo=UTC)
    assert at(noon, now=noon.timestamp() - 60) == 60
    with pytest.raises(InvalidDelay, match="time zone"):
        at(datetime(2027, 1, 1, 12))
    for wrong in (-1, math.nan, math.inf, 10**12):
        with pytest.raises(InvalidDelay):
            after(seconds=wrong)

"""How long things are kept, and in what order they may be forgotten."""

import pytest

from studyhall.patterns.retention import Retention


def test_every_job_says_how_long_it_is_kept():
    options = Retention(completed_count=10, completed_age=60).job_options()
    assert options["removeOnComplete"] == {"count": 10, "age": 60}
    assert "count" not in options["removeOnFail"], "a burst of failures must not evict what nobody has seen"


def test_markers_must_outlive_whatever_can_come_back():
    with pytest.raises(ValueError, match="markers_age"):
        Retention(markers_age=60)

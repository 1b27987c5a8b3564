"""Ticks of our schedule and of BullMQ's own scheduler are both seen, and lateness is measured from their slots."""

import pytest

from bench.sections import scheduler


@pytest.mark.slow
def test_ticks_of_both_schedulers_are_measured(redis_url):
    rows = scheduler.run(redis_url, seconds=4)
    assert set(rows) == {"queuesmith", "stock"}
    ours = rows["queuesmith"]
    assert ours.keys() == scheduler.COLUMNS.keys()
    assert 2 <= ours["ticks"] <= 5, "one a second"
    assert -50 < ours["p50"] <= ours["p95"] <= ours["p99"] <= ours["most"] < 3000


def test_without_a_tick_there_is_no_figure():
    assert scheduler._summary([])["p50"] is None

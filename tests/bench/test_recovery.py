"""Seconds until a killed job runs again are those of its second start, or the reason why there is none."""

import pytest

from bench.sections import recovery

pytestmark = pytest.mark.slow


@pytest.mark.fault
def test_a_killed_job_is_seen_to_start_again(lab, monkeypatch):
    monkeypatch.setattr(recovery, "TAKEOVER", 2.0)
    seconds = recovery.recover(lab, lab.peers[1], limit=60, lowered=True)
    assert isinstance(seconds, float)
    assert seconds > 0.5, "nobody else can get it before its lock has expired"


@pytest.mark.fault
def test_a_job_that_does_not_come_back_in_time_is_reported_as_longer(lab):
    assert recovery.recover(lab, lab.peers[1], limit=1, lowered=False) == "> 1"

"""Slots are the same in every process, also on the days when the clocks change."""

from datetime import datetime
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from studyhall.patterns.schedule import InvalidSchedule, Schedule, Schedules
from studyhall.patterns.schedule.slots import Cadence

BERLIN = "Europe/Berlin"


class Jobs:
    """Stands for `typed_jobs.JobTypes`."""

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(name=name, queue="reports", retry=SimpleNamespace(attempts=3))

    def encode(self, job: str, payload: Any) -> dict[str, Any]:
        return {"v": 1, "payload": dict(payload)}


def local(cron: str, start: datetime, count: int) -> list[str]:
    cadence, times, slot = Cadence(cron, BERLIN), [], start.timestamp() * 1000
    for _ in range(count):
        slot = cadence.next_after(slot)
        times.append(datetime.fromtimestamp(slot / 1000, ZoneInfo(BERLIN)).strftime("%d. %H:%M"))
    return times


def test_a_time_that_the_clock_skips_runs_once_and_one_that_comes_twice_too():
    spring = datetime(2027, 3, 27, 12, tzinfo=ZoneInfo(BERLIN))
    assert local("30 2 * * *", spring, 2) == ["28. 03:30", "29. 02:30"]
    autumn = datetime(2026, 10, 24, 12, tzinfo=ZoneInfo(BERLIN))
    assert local("30 2 * * *", autumn, 2) == ["25. 02:30", "26. 02:30"]


@pytest.mark.parametrize("wrong", [{"cron": "61 * * * *"}, {}, {"cron": "0 3 * * *", "tz": "Mars/Base"}])
def test_nonsense_is_refused_when_it_is_declared(wrong: dict[str, str]):
    with pytest.raises(InvalidSchedule):
        Schedules(Jobs(), [Schedule("nightly", "report", **wrong)])

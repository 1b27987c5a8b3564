"""Slots: the same in every process, right on the days when the clocks change; nonsense is refused by name."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from bullmq.job_scheduler import default_repeat_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from studyhall.patterns.schedule import InvalidSchedule, Schedule, Schedules
from studyhall.patterns.schedule.slots import Cadence
from studyhall.patterns.typed_jobs import JobTypes, Payload

BERLIN = "Europe/Berlin"
YEAR = 366 * 24 * 3600 * 1000


def local(cadence, start, count):
    """The next slots as clock and offset of their zone."""
    times, slot = [], start.timestamp() * 1000
    for _ in range(count):
        slot = cadence.next_after(slot)
        times.append(datetime.fromtimestamp(slot / 1000, ZoneInfo(cadence.tz)).strftime("%d. %H:%M%z"))
    return times


def test_a_time_that_the_clock_skips_runs_once_an_hour_later():
    start = datetime(2027, 3, 27, 12, tzinfo=ZoneInfo(BERLIN))
    assert local(Cadence("30 2 * * *", BERLIN), start, 2) == ["28. 03:30+0200", "29. 02:30+0200"]


def test_an_hourly_schedule_has_one_slot_per_real_hour_through_both_changes():
    hourly = Cadence("0 * * * *", BERLIN)
    for start in (datetime(2026, 10, 24, 20, tzinfo=UTC), datetime(2027, 3, 27, 20, tzinfo=UTC)):
        slot = start.timestamp() * 1000
        for _ in range(12):
            following = hourly.next_after(slot)
            assert following - slot == 3_600_000
            slot = following


def test_croniter_alone_is_an_hour_off_when_summer_time_ends():
    """The naive twin: what BullMQ computes by itself. When this fails, the detour has become needless."""
    eve = int(datetime(2026, 10, 24, 12, tzinfo=ZoneInfo(BERLIN)).timestamp() * 1000)
    naive = default_repeat_strategy(eve, {"pattern": "0 3 * * *", "tz": BERLIN})
    assert naive is not None
    assert datetime.fromtimestamp(naive / 1000, ZoneInfo(BERLIN)).strftime("%H:%M") == "04:00"
    assert Cadence("0 3 * * *", BERLIN).next_after(eve) == naive - 3_600_000


def test_utc_knows_no_daylight_saving():
    start = datetime(2026, 10, 24, 12, tzinfo=UTC)
    assert local(Cadence("30 2 * * *"), start, 2) == ["25. 02:30+0000", "26. 02:30+0000"]


@settings(deadline=None)
@given(
    moment=st.integers(1_700_000_000_000, 1_700_000_000_000 + 2 * YEAR),
    cadence=st.sampled_from(
        [
            Cadence("*/5 * * * *"),
            Cadence("30 2 * * *", BERLIN),
            Cadence("15 */6 * * 1", "America/New_York"),
            Cadence("0 0 1 * *", "Australia/Lord_Howe"),
            Cadence(every=0.25),
            Cadence(every=90),
        ]
    ),
    gap=st.integers(0, 600_000),
)
def test_slots_do_not_depend_on_who_looks_and_when(moment, cadence, gap):
    slot = cadence.next_after(moment)
    assert slot > moment
    assert cadence.is_slot(slot)
    later = min(moment + gap, slot - 1)
    assert cadence.next_after(later) == slot, "looking later, before the slot, names the same slot"
    assert cadence.missed(moment, slot, 9) == (0, [])
    following = cadence.next_after(slot)
    assert cadence.missed(slot, cadence.next_after(following), 9) == (1, [following])


@settings(deadline=None)  # asking one by one is slow
@given(
    first=st.integers(1_700_000_000_000, 1_700_000_000_000 + 2 * YEAR),
    days=st.floats(0, 9),
    keep=st.integers(1, 50),
    cadence=st.sampled_from(
        [
            Cadence("*/20 * * * *"),
            Cadence("7 13 */10 * * *"),
            Cadence("30 * * * *", BERLIN),
            Cadence("30 0-3 * * *", BERLIN),
            Cadence("15 */6 1-7 * 1", "America/New_York"),
            Cadence("*/30 * * * *", "Australia/Lord_Howe"),
            Cadence("10 0 * * *", "America/Asuncion"),
            Cadence(every=1200),
        ]
    ),
    change=st.booleans(),
)
def test_missed_slots_are_counted_as_if_asked_for_one_by_one(first, days, keep, cadence, change):
    if change:  # most days are alike: look at those around a change of the clock
        first = first % (5 * 86_400_000) + int(datetime(2026, 10, 22, tzinfo=UTC).timestamp() * 1000)
    last = first + int(days * 86_400_000)
    slots, slot = [], cadence.next_after(first)
    while slot < last:
        slots.append(slot)
        slot = cadence.next_after(slot)
    assert cadence.missed(first, last, keep) == (len(slots), slots[-keep:])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cron": "61 * * * *"}, "cannot be read"),
        ({"cron": "* * *"}, "needs 5 fields"),
        ({"cron": "every day"}, "needs 5 fields"),
        ({"cron": ""}, "needs 5 fields"),
        ({"cron": "0 0 30 2 *"}, "never fires"),
        ({"cron": 5}, "needs 5 fields"),
        ({"cron": "0 3 * * *", "tz": "Europe/Atlantis"}, "unknown time zone"),
        ({"cron": "0 3 * * *", "tz": ""}, "unknown time zone"),
        ({"cron": "0 3 * * *", "tz": "../etc/passwd"}, "unknown time zone"),
        ({"cron": "0 3 * * *", "tz": None}, "unknown time zone"),
        ({"cron": "*/5 * * * * *", "tz": BERLIN}, "needs UTC"),
        ({"every": 0}, "between"),
        ({"every": -5}, "between"),
        ({"every": float("nan")}, "between"),
        ({"every": float("inf")}, "between"),
        ({"every": "10"}, "number of seconds"),
        ({"every": True}, "number of seconds"),
        ({"every": 5, "cron": "* * * * *"}, "either cron or every"),
        ({}, "either cron or every"),
        ({"every": 5, "job": "no-such-job"}, "no job type"),
        ({"every": 5, "payload": {"surprise": 1}}, "malformed"),
        ({"every": 5, "id": "With:Colon"}, "lower-case"),
        ({"every": 5, "id": ""}, "lower-case"),
        ({"every": 5, "overlap": "maybe"}, "overlap is skip or queue"),
        ({"every": 5, "jitter": 5}, "shorter than its interval"),
        ({"every": 5, "jitter": -1}, "shorter than its interval"),
    ],
)
def test_nonsense_is_refused_when_it_is_declared(given, named):
    with pytest.raises(InvalidSchedule, match=named):
        Schedules(jobs(), [Schedule(**{"id": "x", "job": "tick", **given})])


def test_two_schedules_cannot_share_an_id_past_or_present():
    with pytest.raises(InvalidSchedule, match="called 'a'"):
        Schedules(jobs(), [Schedule("a", "tick", every=1), Schedule("b", "tick", every=1, was=["a"])])


def jobs():
    async def tick(ctx, payload: Payload): ...

    types = JobTypes()
    types.register(name="tick", payload=Payload, handler=tick)
    return types

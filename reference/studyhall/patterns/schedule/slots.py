"""When a schedule fires: its slots. Pure arithmetic, the same in every process.

Promise: a slot is a moment (epoch milliseconds) that follows from the schedule alone, never from who looks or
when: every process names the same slots, so a slot can be the key under which its tick runs once. `every`
slots lie on the grid of multiples since 1970. Cron slots are in UTC unless a time zone is named.

Daylight saving, in a named zone: a time that the clock skips runs an hour later by the clock (02:30 at
03:30), once. A time that comes twice runs the first time only, unless the hour is a wildcard: then each real
hour has its tick. croniter alone gets the change of October wrong (measured with the version that bullmq
pins: the repeated hour of an hourly job is left out, and `0 3 * * *` in Europe/Berlin runs at 04:00), so it is
asked for wall-clock times only and the zone is applied here.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import product
from typing import Any
from zoneinfo import ZoneInfo

from bullmq.job_scheduler import default_repeat_strategy
from croniter import croniter

from ..core.errors import ForgedJob, Permanent

__all__ = ["Cadence", "InvalidSchedule", "Tick", "check_slot", "signing_id", "tick_of"]

LONGEST = 366 * 24 * 3600.0
SHORTEST = 0.05
FIELD = "schedule"  # of the job's data: signed with it
_NEAR = timedelta(hours=3)  # no zone moves its clock by more


class InvalidSchedule(Permanent):
    """The schedule cannot be used: fix its id, cron expression, time zone, interval, job name or payload."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """Either `cron` (5 fields, or 6 with seconds first) in `tz`, or `every` N seconds."""

    cron: str | None = None
    tz: str = "UTC"
    every: float | None = None

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every is None):
            raise InvalidSchedule("give either cron or every, not both")
        try:
            zone = ZoneInfo(self.tz)
        except Exception:  # ValueError, OSError, ZoneInfoNotFoundError, by the kind of nonsense
            raise InvalidSchedule(f"unknown time zone {self.tz!r}: use a name such as Europe/Berlin") from None
        if self.cron is not None:
            self._check_cron(zone)
        elif isinstance(self.every, bool) or not isinstance(self.every, int | float):
            raise InvalidSchedule(f"every is a number of seconds, got {self.every!r}")
        elif not SHORTEST <= self.every <= LONGEST:
            raise InvalidSchedule(f"every must be between {SHORTEST} s and a year, got {self.every!r}")

    def _check_cron(self, zone: ZoneInfo) -> None:
        fields = self.cron.split() if isinstance(self.cron, str) else []
        if len(fields) not in (5, 6):
            raise InvalidSchedule(
                f"cron {self.cron!r} needs 5 fields (minute hour day month weekday), or 6 with seconds first"
            )
        if len(fields) == 6 and self.tz != "UTC" and not fields[0].isdigit():
            raise InvalidSchedule("more than one tick a minute needs UTC: use tz='UTC', or every=")
        try:
            self.next_after(0)
        except Exception as error:
            raise InvalidSchedule(f"cron {self.cron!r} cannot be read, or never fires: {error}") from None

    def next_after(self, millis: float) -> int:
        """The first slot after that moment."""
        if self.every is not None:
            step = round(self.every * 1000)
            return (int(millis) // step + 1) * step
        if self.tz == "UTC":
            return _millis(croniter(self.cron, _utc(millis), second_at_beginning=True).get_next(datetime))
        return self._next_in_zone(millis)

    def _next_in_zone(self, millis: float) -> int:
        zone, now = ZoneInfo(self.tz), _utc(millis)
        offsets = {(now + shift).astimezone(zone).utcoffset() for shift in (-_NEAR, timedelta(), _NEAR)}
        wall = now.astimezone(zone).replace(tzinfo=None)
        if len(offsets) == 1:  # no change of the clock near: wall time and real time run alike
            return next(slot for slot in self._slots_from(wall, zone) if slot > millis)
        # Near a change, later wall times may be earlier moments: look at all of those nearby.
        slots: list[int] = []
        for slot in self._slots_from(wall - _NEAR, zone):
            if slot > millis:
                slots.append(slot)
                if slot > millis + 2 * _NEAR.total_seconds() * 1000:
                    break
        return min(slots)

    def _slots_from(self, wall: datetime, zone: ZoneInfo) -> Iterator[int]:
        times = croniter(self.cron, wall, second_at_beginning=True)
        while True:
            yield from self._slots_at(times.get_next(datetime), zone)

    def _slots_at(self, wall: datetime, zone: ZoneInfo) -> Iterator[int]:
        assert self.cron is not None
        first, second = (_millis(wall.replace(tzinfo=zone, fold=fold)) for fold in (0, 1))
        yield first
        # In a gap the second reading is the earlier one; only a repeated hour has a later one.
        if second > first and self.cron.split()[-4].startswith("*"):
            yield second

    def is_slot(self, millis: int) -> bool:
        if self.next_after(millis - 1) == millis:
            return True
        # BullMQ's worker computes the next slot by croniter alone. Near a change of the clock that may be a
        # slot of its own making; it is corrected by `Schedules.heal`, but it is not a forgery.
        repeat = {"pattern": self.cron, "tz": self.tz}
        return self.cron is not None and default_repeat_strategy(millis - 1, repeat) == millis

    def missed(self, first: int, last: int, keep: int) -> tuple[int, list[int]]:
        """How many slots lie strictly between the two, and the latest `keep` of them, in order.

        Counted by whole days: asking croniter for one slot after the other took 3.4 s for 10,000 of them.
        """
        if self.every is not None:
            step = round(self.every * 1000)
            grid = range((first // step + 1) * step, last, step)
            return len(grid), list(grid[-keep:])
        if self.next_after(first) >= last:
            return 0, []
        count, latest, zone = 0, list[int](), ZoneInfo(self.tz)
        times = self._times_of_day()
        begin, end = (_utc(moment).astimezone(zone).date() for moment in (first, last))
        day = end + timedelta(days=1)  # a time that the clock skips may move over midnight
        while day >= begin - timedelta(days=1):
            if self._runs_on(day):
                base, slots = self._slots_of(day, times, zone)
                low, high = bisect_right(slots, first - base), bisect_left(slots, last - base)
                count += max(0, high - low)
                latest += [base + slot for slot in slots[max(low, high - keep + len(latest)) : high]][::-1]
            day -= timedelta(days=1)
        return count, latest[::-1]

    def _times_of_day(self) -> list[int]:
        """In milliseconds since midnight."""
        fields, _ = croniter.expand(self.cron, second_at_beginning=True)
        minutes, hours, seconds = fields[0], fields[1], (*fields[5:], [0])[0]
        every = [
            range(size) if values == ["*"] else values for values, size in ((hours, 24), (minutes, 60), (seconds, 60))
        ]
        return sorted((3600 * hour + 60 * minute + second) * 1000 for hour, minute, second in product(*every))

    def _runs_on(self, day: date) -> bool:
        assert self.cron is not None
        days = self.cron.split()[-3:]
        midnight = datetime(day.year, day.month, day.day)
        return days == ["*", "*", "*"] or bool(croniter.match(f"0 0 {' '.join(days)}", midnight))

    def _slots_of(self, day: date, times: list[int], zone: ZoneInfo) -> tuple[int, list[int]]:
        """A base, and the slots of the day counted from it."""
        midnight = datetime(day.year, day.month, day.day)
        start, end = ((midnight + timedelta(days=more)).replace(tzinfo=zone) for more in (0, 1))
        if start.utcoffset() == end.utcoffset():
            return _millis(start), times
        wall_times = (midnight + timedelta(milliseconds=time) for time in times)
        return 0, sorted({slot for at in wall_times for slot in self._slots_at(at, zone)})

    def __str__(self) -> str:
        return f"every {self.every:g} s" if self.every is not None else f"{self.cron} ({self.tz})"


@dataclass(frozen=True, slots=True)
class Tick:
    """One slot of one schedule. `declared` is what the schedule said when the tick was planned: another
    version of the application may declare it otherwise by now. Trust it after the signature is verified."""

    schedule: str
    slot: int  # epoch milliseconds
    declared: Mapping[str, Any]

    @property
    def at(self) -> datetime:
        return _utc(self.slot)

    @property
    def cadence(self) -> Cadence:
        return Cadence(self.declared.get("cron"), self.declared.get("tz", "UTC"), self.declared.get("every"))

    @property
    def since(self) -> int:
        """When its cron or interval was changed last: earlier slots are not its own."""
        return int(self.declared.get("since", 0))


def tick_of(job_id: str, data: object) -> Tick | None:
    """The tick that a job of a scheduler stands for; None for every other job."""
    declared = data.get(FIELD) if isinstance(data, dict) else None
    if not isinstance(declared, dict):
        return None
    match = re.fullmatch(r"repeat:([a-z0-9-]{1,60}):([0-9]{1,15})", str(job_id))
    if match is None or match[1] != declared.get("id"):
        raise ForgedJob("the job says it belongs to a schedule, but its id is not one of that schedule's ticks")
    return Tick(match[1], int(match[2]), declared)


def signing_id(job_id: str, data: object) -> str:
    """What is signed in place of the job's id. A tick's id is not known when its template is signed,
    so the schedule's id takes its place. After verifying, `check_slot`: whoever copies a signed template can
    then at most name a genuine slot, and the idempotency marker lets that one run once."""
    tick = tick_of(job_id, data)
    return job_id if tick is None else f"repeat:{tick.schedule}"


def check_slot(job_id: str, data: Mapping[str, Any]) -> None:
    """Raise `ForgedJob` for a tick at a time that is not in its schedule."""
    if (tick := tick_of(job_id, data)) and not tick.cadence.is_slot(tick.slot):
        raise ForgedJob(f"{tick.at:%Y-%m-%d %H:%M:%S} UTC is not a slot of schedule {tick.schedule}")


def _utc(millis: float) -> datetime:
    return datetime.fromtimestamp(millis / 1000, UTC)


def _millis(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)

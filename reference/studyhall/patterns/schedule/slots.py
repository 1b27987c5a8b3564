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

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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
    """Either `cron` (5 fields, or 6 with seconds first) in `tz`, or `every` so many seconds."""

    cron: str | None = None
    tz: str = "UTC"
    every: float | None = None

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every is None):
            raise InvalidSchedule("give either cron or every, not both and not neither")
        try:
            zone = ZoneInfo(self.tz)
        except Exception:  # ValueError, OSError, ZoneInfoNotFoundError, by the kind of nonsense
            raise InvalidSchedule(
                f"unknown time zone {self.tz!r}: use a name such as Europe/Berlin"
            ) from None
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
        # Near a change, later wall times may be earlier moments: look at all of them around.
        found: list[int] = []
        for slot in self._slots_from(wall - _NEAR, zone):
            if slot > millis:
                found.append(slot)
                if slot > millis + 2 * _NEAR.total_seconds() * 1000:
                    break
        return min(found)

    def _slots_from(self, wall: datetime, zone: ZoneInfo) -> Iterator[int]:
        assert self.cron is not None
        hourly = self.cron.split()[-4].startswith("*")
        times = croniter(self.cron, wall, second_at_beginning=True)
        while True:
            at: datetime = times.get_next(datetime)
            first, second = (at.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
            yield _millis(first)
            # In a gap the second reading is the earlier one; only a repeated hour has a later one.
            if hourly and _millis(second) > _millis(first):
                yield _millis(second)

    def is_slot(self, millis: int) -> bool:
        if self.next_after(millis - 1) == millis:
            return True
        # BullMQ's worker computes the next slot by croniter alone. Near a change of the clock that may be a
        # slot of its own making; it is corrected by `Schedules.heal`, but it is no forgery.
        repeat = {"pattern": self.cron, "tz": self.tz}
        return self.cron is not None and default_repeat_strategy(millis - 1, repeat) == millis

    def between(self, first: int, last: int, *, limit: int = 10_000) -> Sequence[int]:
        """The slots strictly between the two; of an interval the latest `limit`, of cron the first."""
        if self.every is not None:
            step = round(self.every * 1000)
            return range((first // step + 1) * step, last, step)[-limit:]
        found: list[int] = []
        while (slot := self.next_after(found[-1] if found else first)) < last and len(found) < limit:
            found.append(slot)
        return found

    def __str__(self) -> str:
        return f"every {self.every:g} s" if self.every is not None else f"{self.cron} ({self.tz})"


@dataclass(frozen=True, slots=True)
class Tick:
    """One slot of one schedule."""

    schedule: str
    slot: int  # epoch milliseconds

    @property
    def at(self) -> datetime:
        return _utc(self.slot)


def tick_of(job_id: str, data: object) -> Tick | None:
    """The tick that a job of a scheduler stands for; None for every other job."""
    said = data.get(FIELD) if isinstance(data, dict) else None
    if not isinstance(said, dict):
        return None
    match = re.fullmatch(r"repeat:([a-z0-9-]{1,60}):([0-9]{1,15})", str(job_id))
    if match is None or match[1] != said.get("id"):
        raise ForgedJob(
            "the job says it belongs to a schedule, but its id is not one of that schedule's ticks"
        )
    return Tick(match[1], int(match[2]))


def signing_id(job_id: str, data: object) -> str:
    """What stands for the job's id under its signature. A tick's id is not known when its template is signed,
    so the schedule's id takes its place. After verifying, `check_slot`: whoever copies a signed template can
    then at most name a genuine slot, and the idempotency marker lets that one run once."""
    tick = tick_of(job_id, data)
    return job_id if tick is None else f"repeat:{tick.schedule}"


def check_slot(job_id: str, data: Mapping[str, Any]) -> None:
    """Raise `ForgedJob` for a tick at a time that is not in its schedule."""
    if tick := tick_of(job_id, data):
        said = data[FIELD]
        if not Cadence(said.get("cron"), said.get("tz", "UTC"), said.get("every")).is_slot(tick.slot):
            raise ForgedJob(f"{tick.at:%Y-%m-%d %H:%M:%S} UTC is not a slot of schedule {tick.schedule}")


def _utc(millis: float) -> datetime:
    return datetime.fromtimestamp(millis / 1000, UTC)


def _millis(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)

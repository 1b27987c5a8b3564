"""Recurring jobs: declared in code, kept by BullMQ's job scheduler, at most one effect per tick."""

from .keeper import Schedule, ScheduleKeeper, Schedules, ticking
from .slots import InvalidSchedule, signing_id

__all__ = ["InvalidSchedule", "Schedule", "ScheduleKeeper", "Schedules", "signing_id", "ticking"]

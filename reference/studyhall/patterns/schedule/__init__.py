"""Recurring jobs: declared in code, kept by BullMQ's job scheduler, at most one effect per tick."""

from __future__ import annotations

from .keeper import Applied, Schedule, ScheduleKeeper, Schedules, ScheduleState, UnknownSchedule, ticking
from .slots import InvalidSchedule, signing_id

__all__ = [
    "Applied",
    "InvalidSchedule",
    "Schedule",
    "ScheduleKeeper",
    "ScheduleState",
    "Schedules",
    "UnknownSchedule",
    "signing_id",
    "ticking",
]

"""Recurring jobs: declared in code, kept by BullMQ's job scheduler, at most one effect per tick."""

from __future__ import annotations

from .keeper import InvalidSchedule, Schedule, ScheduleKeeper, Schedules, UnknownSchedule, ticking
from .slots import signing_id

__all__ = [
    "InvalidSchedule",
    "Schedule",
    "ScheduleKeeper",
    "Schedules",
    "UnknownSchedule",
    "signing_id",
    "ticking",
]

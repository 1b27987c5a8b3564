"""Recurring jobs: declared in code, kept by BullMQ's job scheduler, at most one effect per tick."""

from __future__ import annotations

from .keeper import (
    Applied,
    InvalidSchedule,
    Schedule,
    ScheduleKeeper,
    Schedules,
    ScheduleState,
    UnknownSchedule,
)
from .slots import Cadence, Tick, check_slot, signing_id, tick_of

__all__ = [
    "Applied",
    "Cadence",
    "InvalidSchedule",
    "Schedule",
    "ScheduleKeeper",
    "ScheduleState",
    "Schedules",
    "Tick",
    "UnknownSchedule",
    "check_slot",
    "signing_id",
    "tick_of",
]

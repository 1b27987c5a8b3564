"""Jobs that failed for good are kept, seen and replayable; none is forgotten."""

from __future__ import annotations

from .archive import DeadLetter, UnknownLetter, dead_letters, find, list_letters, purge, show
from .replayer import (
    AlreadyReplayed,
    ChildrenFirst,
    NotDeadLetter,
    NothingToReplay,
    Replayed,
    ReplayRunning,
    replay,
    replay_many,
)
from .sweeper import Swept, sweep

__all__ = [
    "AlreadyReplayed",
    "ChildrenFirst",
    "DeadLetter",
    "NotDeadLetter",
    "NothingToReplay",
    "ReplayRunning",
    "Replayed",
    "Swept",
    "UnknownLetter",
    "dead_letters",
    "find",
    "list_letters",
    "purge",
    "replay",
    "replay_many",
    "show",
    "sweep",
]

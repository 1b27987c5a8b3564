"""Jobs that failed for good are kept, seen and replayable; none is forgotten."""

from .archive import (
    DeadLetter,
    UnknownDeadLetter,
    counts,
    dead_letters,
    find,
    list_dead_letters,
    needed_by_dead_letters,
    purge,
    reason_of,
    show,
)
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
    # what is kept, and how to read it
    "DeadLetter",
    "UnknownDeadLetter",
    "counts",
    "dead_letters",
    "find",
    "list_dead_letters",
    "needed_by_dead_letters",
    "purge",
    "reason_of",
    "show",
    # back into the queue
    "AlreadyReplayed",
    "ChildrenFirst",
    "NotDeadLetter",
    "NothingToReplay",
    "ReplayRunning",
    "Replayed",
    "replay",
    "replay_many",
    # out of Redis
    "Swept",
    "sweep",
]

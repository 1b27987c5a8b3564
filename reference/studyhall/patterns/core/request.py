"""What is asked for: a request for a job, the job on its way into the queue, and the correlation id of whoever asks.

All that code which only enqueues has to know. Only the standard library here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "AddNext",
    "AddStep",
    "Enqueues",
    "JobRef",
    "JobRequest",
    "Outgoing",
    # on whose behalf
    "correlation",
    "current_correlation_id",
    "new_correlation_id",
]

_GOOD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_correlation: ContextVar[str] = ContextVar("correlation_id", default="")


@dataclass(frozen=True, slots=True)
class JobRef:
    """Where the job is."""

    queue: str
    name: str
    id: str
    key: str


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What to run. `key` is what makes the request unique in the business, such as the order number."""

    name: str
    payload: Any  # a mapping, or a model of the job type
    key: str
    delay: float = 0.0
    priority: str | int = "normal"
    max_age: float | None = None  # seconds after which running it is pointless
    children: Sequence[JobRequest] = field(default=())
    on_failure: str = "wait"  # as a child: what its failure does to its parent, see `flow`
    meta: Mapping[str, Any] = field(default_factory=dict)
    queue: str = ""  # where no job type says it


@dataclass(slots=True)
class Outgoing:
    """A job on its way into the queue: the steps of a producer fill it in."""

    request: JobRequest
    ref: JobRef
    data: dict[str, Any]
    opts: dict[str, Any]
    extras: dict[str, Any] = field(default_factory=dict)  # beside the payload, in an envelope of ours
    children: list[Outgoing] = field(default_factory=list)


AddNext = Callable[[], Awaitable[None]]
# Of a producer: `await call_next()` adds them.
AddStep = Callable[[Sequence[Outgoing], AddNext], Awaitable[None]]


class Enqueues(Protocol):
    """What patterns need of a producer; `producer.Producer` is one."""

    async def enqueue(self, request: JobRequest) -> JobRef: ...
    async def admit(self, request: JobRequest) -> None: ...
    async def checked(self, request: JobRequest) -> JobRequest: ...
    def ref(self, request: JobRequest) -> JobRef: ...


def new_correlation_id() -> str:
    return uuid.uuid4().hex


def current_correlation_id() -> str:
    """The id of the request or job that this code works for; empty outside of one."""
    return _correlation.get()


@contextmanager
def correlation(ident: object = None) -> Iterator[str]:
    """Work under this correlation id, or a new one when `ident` is none that we would write into a log."""
    given = ident if isinstance(ident, str) and _GOOD_ID.fullmatch(ident) else new_correlation_id()
    was = _correlation.set(given)
    try:
        yield given
    finally:
        _correlation.reset(was)

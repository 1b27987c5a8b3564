"""The job model: the rules of a kind of job, how one execution ends, and on whose behalf; requests are in
`request`. Every pattern uses these types, so none has to import another for a name. Only the standard library here.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .failures import Cancelled

__all__ = [
    # the rules of one kind of job
    "DAY",
    "Deadline",
    "RetryPolicy",
    # how one execution ends
    "Decision",
    "Done",
    "Outcome",
    "Save",
    # shared by all who touch a job
    "CANCELLED",
    "STOP",
    "cancelled",
    "provider_key",
    "stop_reason",
    # on whose behalf
    "correlation",
    "current_correlation_id",
    "new_correlation_id",
]

DAY = 24 * 3600.0
CANCELLED = "cancelled"  # the only field of a cancelled job's result
STOP = "cancelled: "  # how a running processor is told; other cancellations are drains and lost locks

_GOOD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_correlation: ContextVar[str] = ContextVar("correlation_id", default="")

Save = Callable[[Any], Awaitable[object]]  # an effect, given the transaction it belongs to


class Outcome(StrEnum):
    """How one execution ended."""

    COMPLETED = "completed"
    DUPLICATE = "duplicate"  # done before: the stored result was returned
    RETRY = "retry"  # failed, comes back, an attempt is consumed
    SNOOZED = "snoozed"  # waits (rate limit, busy, an outage, nothing to do yet), no attempt is consumed
    PERMANENT = "permanent"  # the error will never pass
    EXHAUSTED = "exhausted"  # every attempt failed
    EXPIRED = "expired"  # waited longer than max_age
    CANCELLED = "cancelled"  # final, and not a failure
    RELEASED = "released"  # interrupted by a shutdown or a lost lock; another worker takes it


@dataclass(frozen=True, slots=True)
class Done:
    """What a handler returns: its result, and the database effect that belongs to it (see `once`)."""

    result: Any = None
    save: Save | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Seconds, but for the counts. The pause after the nth failure is random up to `min(cap, base * 2**n)`."""

    base: float = 1.0
    cap: float = 60.0
    attempts: int = 3  # counts the first run too
    max_age: float = DAY  # bounds waiting that consumes no attempt, from when the job was due or replayed
    # Share of a pause that is never left out: 0 spreads a herd best, 0.5 makes pauses grow.
    floor: float = 0.0
    max_waits: float = math.inf  # how often it may wait for free
    scale: float = 1.0  # of every pause; 0 in tests

    def __post_init__(self) -> None:
        if not 0 < self.base <= self.cap < math.inf:
            raise ValueError(f"need 0 < base <= cap, got base={self.base} cap={self.cap}")
        if self.attempts < 1:
            raise ValueError(f"attempts counts the first run, so it is at least 1, got {self.attempts}")
        if not (self.max_age > 0 and 0 <= self.floor <= 1 and min(self.max_waits, self.scale) >= 0):
            raise ValueError(f"need max_age > 0, floor from 0 to 1, max_waits and scale from 0, got {self}")


@dataclass(frozen=True, slots=True)
class Deadline:
    """Limit of a kind of job. Attempt n gets `seconds * growth**(n-1)`, never more than `longest`."""

    seconds: float
    growth: float = 1.0
    longest: float = math.inf

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.growth >= 1 and self.longest >= self.seconds):
            raise ValueError(f"need seconds > 0, growth >= 1, longest >= seconds, got {self}")

    def limit_for(self, attempt: int) -> float:
        """Seconds for this attempt, counted from 1."""
        return min(self.seconds * self.growth ** min(max(attempt - 1, 0), 64), self.longest)


@dataclass(frozen=True, slots=True)
class Decision:
    """Run again in `delay` seconds, or never when that is None. `reason` quotes the error: redact it."""

    outcome: Outcome
    reason: str
    delay: float | None = None
    consume_attempt: bool = True


def cancelled(result: object) -> str | None:
    """The reason, if this is the result of a cancelled job."""
    reason = result.get(CANCELLED) if isinstance(result, dict) and len(result) == 1 else None
    return reason if isinstance(reason, str) else None


def stop_reason(error: BaseException) -> str | None:
    """Why somebody cancelled the running job; None if the worker is draining or lost the job's lock."""
    if isinstance(error, Cancelled):
        return str(error)
    text = str(error)
    return text.removeprefix(STOP) if text.startswith(STOP) else None


def provider_key(business_key: str, step: str) -> str:
    """The idempotency key to send to an outside service: equal in every retry, replay and process."""
    return hashlib.sha256(json.dumps([business_key, step]).encode()).hexdigest()[:40]


def new_correlation_id() -> str:
    return os.urandom(16).hex()


def current_correlation_id() -> str:
    """The id of the request or job that this code works for; empty outside of one."""
    return _correlation.get()


@contextmanager
def correlation(ident: object = None) -> Iterator[str]:
    """Work under this correlation id, or a new one when `ident` is not fit for a log."""
    token = take_correlation(ident)
    try:
        yield _correlation.get()
    finally:
        _correlation.reset(token)


def take_correlation(ident: object = None) -> Token[str]:
    return _correlation.set(ident if isinstance(ident, str) and _GOOD_ID.fullmatch(ident) else new_correlation_id())

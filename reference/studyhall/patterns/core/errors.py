"""What a job's code raises to say what should happen next.

The class decides, never the message text: `retry.decide` turns each of these into exactly one outcome.
Anything else that escapes a handler is treated as `Transient`, because a bug that retries a few times and
then lands in the dead letters is visible, while work that is dropped is not.
"""

from .failures import (
    Cancelled,
    FailedTwin,
    InvalidDelay,
    JobError,
    KeyReused,
    Permanent,
    QueueUnavailable,
    Transient,
    Unavailable,
    clean_text,
    describe,
)

__all__ = [
    # outcomes of a job
    "Cancelled",
    "DeadlineExceeded",
    "Expired",
    "ForgedJob",
    "InvalidDelay",
    "JobError",
    "KeyReused",
    "Permanent",
    "RateLimited",
    "ResourceBusy",
    "Snooze",
    "Transient",
    "Unavailable",
    # answers of a producer
    "FailedTwin",
    "Overloaded",
    "QueueUnavailable",
    # what a bare processor raises: `retry.decide` maps the above to them
    "FailPermanently",
    "RetryLater",
    # words about an error
    "clean_text",
    "describe",
]


class DeadlineExceeded(Transient):
    """The work ran into its time limit. Raise it, let it grow per attempt, or checkpoint smaller steps."""

    def __init__(self, message: str, *, limit: float = 0.0, partial: object = None, abandoned: bool = False) -> None:
        super().__init__(message)
        self.limit = limit
        self.partial = partial
        self.abandoned = abandoned


class ForgedJob(Permanent):
    """The job is unsigned, was altered, or was signed with a key this worker does not accept."""


class RateLimited(JobError):
    """The other side said when to come back: wait that long, consuming no attempt."""

    def __init__(self, message: str = "rate limited", *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ResourceBusy(JobError):
    """A shared resource is taken (pool, seat, lock): wait a little, consuming no attempt."""

    def __init__(self, message: str = "resource busy", *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Snooze(JobError):
    """Not an error: there is nothing to do yet. Run again after `delay` seconds, consuming no attempt."""

    def __init__(self, delay: float, message: str = "snoozed") -> None:
        super().__init__(message)
        self.delay = delay


class Expired(Permanent):
    """The job waited longer than its result is worth. Raise its max_age, or add workers."""


class Overloaded(ResourceBusy):
    """The queue is too long to take more. Nothing was stored; send it again after `retry_after` seconds."""


class RetryLater(Exception):
    """Run this job again after `delay` seconds. With `consume_attempt` it counts as a failed attempt.

    `trace` is kept in Redis instead of this exception's own, whose causes may quote somebody's data.
    """

    def __init__(
        self, delay: float, *, consume_attempt: bool = False, reason: str = "", trace: str | None = None
    ) -> None:
        super().__init__(reason or f"again in {delay:.3g} s")
        self.delay, self.consume_attempt, self.reason, self.trace = delay, consume_attempt, reason, trace


class FailPermanently(Exception):
    """Fail the job now, whatever attempts are left. `trace`: see `RetryLater`."""

    def __init__(self, reason: str, *, trace: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.trace = reason, trace

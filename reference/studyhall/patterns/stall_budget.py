"""A crash of the worker is not a failure of the job.

Promise: a job that was running when its worker died runs again and keeps all its attempts, however many
workers die, until it was caught in `limit` crashes; then it fails permanently, because a job that keeps
killing its worker would otherwise take the fleet down forever.

It does not hold with BullMQ's default (`maxStalledCount` 1): 1,000 jobs and 18 SIGKILLs made 28 failed jobs
whose attempts were not used up. So the queue's own limit is lifted out of the way and the count is judged here,
in the pipeline, where the failure is logged, measured and dead-lettered like any other.
"""

from collections.abc import Awaitable
from typing import Any

from .core.execution import CallNext, JobContext, Step
from .core.failures import Permanent

__all__ = ["CRASH_LIMIT", "QUEUE_LIMIT", "CrashLoop", "check", "crash_budget"]

CRASH_LIMIT = 20  # innocent neighbours of a process-killer are hit too, so this is far above any attempts
QUEUE_LIMIT = 1_000_000  # what the worker passes as maxStalledCount: never the first to give up


class CrashLoop(Permanent):
    """The job was running during too many crashes. Fix it, or run its work in a child process, then replay it."""


def check(stalled: int, limit: int = CRASH_LIMIT) -> None:
    """Raise `CrashLoop` when the job has used up its crash budget."""
    if stalled > limit:
        raise CrashLoop(f"its worker died {stalled} times while running it (limit {limit}); {CrashLoop.__doc__}")


def crash_budget(limit: int = CRASH_LIMIT) -> Step:
    """Give up a job that was running in more than `limit` crashes of its worker."""

    def crash_budget(run: JobContext, call_next: CallNext) -> Awaitable[Any]:
        check(run.job.stalledCounter, limit)
        return call_next(run)

    return crash_budget

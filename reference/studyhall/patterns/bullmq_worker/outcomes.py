"""How a run ends: what a processor raises to decide it, and the one place that carries it out.

The processor …                              and its job …
- returns a JSON value                       is completed
- returns something else                     fails for good, once, with a message that says so
- raises RetryLater(delay)                   runs again later, consuming an attempt only if told so
- raises FailPermanently, UnrecoverableError fails now, whatever attempts are left
- raises DelayedError, WaitingChildrenError  was moved by the processor itself
- raises anything else                       is retried by its own `attempts` and `backoff`, or fails
- lets the cancellation by `cancel()` escape fails for good: a cancelled job must not come back
  (CancelledError, or AbortError where it took a signal)
- is cancelled because the worker drains     is released: it goes back to the queue and consumes no attempt
- is cancelled because its loop was ended    comes back as stalled: without a `drain()` it is a crash
- lost its lock                              belongs to somebody else: nothing is written
"""

import asyncio
import json
import random
import traceback
from collections.abc import Callable
from typing import Any

from bullmq.abort_controller import AbortError
from bullmq.custom_errors import DelayedError, UnrecoverableError, WaitingChildrenError
from bullmq.job import Job

from ..core.errors import FailPermanently, RetryLater, clean_text, describe
from ..core.failures import MAX_TEXT
from .events import WorkerEvents
from .ledger import ChangeRefused, Found, JobLedger, LockLost, Run

__all__ = ["BackoffStrategy", "Outcomes"]

TRACES_KEPT = 10  # stock keeps one per attempt forever
LONGEST_BACKOFF = 365 * 24 * 3_600_000
# (failures so far, type, error, job) -> ms; 0: at once, -1: no more
BackoffStrategy = Callable[[int, str, BaseException, Job], float | None]
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Outcomes:
    def __init__(
        self,
        ledger: JobLedger,
        events: WorkerEvents,
        *,
        keep_completed: Any,
        keep_failed: Any,
        backoff_strategy: BackoffStrategy | None = None,
    ) -> None:
        self._ledger, self._events, self._backoff_strategy = ledger, events, backoff_strategy
        self._keep_completed, self._keep_failed = keep_completed, keep_failed
        self.released: list[str] = []

    async def complete(self, run: Run, result: Any, *, fetch: bool) -> Found | None:
        if run.lost:
            raise LockLost(f"job {run.job_id} finished after its lock was lost; its result is thrown away")
        keep = run.job.opts.get("removeOnComplete", self._keep_completed)
        next_job = await self._ledger.completed(run, _as_json(run, result), keep, fetch=fetch)
        run.job.returnvalue = result
        self._events.emit("completed", run.job, result)
        return next_job

    async def settle(  # noqa: PLR0911
        self, run: Run, error: BaseException, *, fetch: bool, loop_ends: bool
    ) -> Found | None:
        """Carry out what `error` asks for. Returns the next job if the script gave one, None if it cannot."""
        assert run.task is not None
        while run.task.cancelling():
            run.task.uncancel()
        if run.lost:
            raise LockLost(f"job {run.job_id} was stopped: its lock was lost, another may run it") from error
        match error:
            case DelayedError() | WaitingChildrenError():
                return None
            case RetryLater():
                return await self._retry_later(run, error, fetch)
            case FailPermanently() | UnrecoverableError():
                return await self._fail(run, error, fetch)
            case _ if run.draining:
                await self.release(run)
                return None
            case Exception() | asyncio.CancelledError() if loop_ends and run.cancelled is None:
                # sys.exit() in a task that a processor started ends the loop, and nobody knows whose it was. If
                # released, the culprit would end every next worker too, and no budget would count it.
                raise LockLost(f"job {run.job_id} ran when its event loop was ended: that is a crash, it comes back")
            case AbortError() if run.cancelled is not None:
                return await self._fail(run, error, fetch)
            case asyncio.CancelledError() if run.cancelled is not None:
                return await self._fail(run, FailPermanently(f"cancelled: {run.cancelled}"), fetch)
            case asyncio.CancelledError():  # of the processor's own making; it ends a stock worker silently
                error = RuntimeError("the processor let a CancelledError escape that nobody asked for")
            case ChangeRefused() if error.code == ChangeRefused.FAILED_CHILDREN:
                return await self._fail(run, FailPermanently(str(error)), fetch)
        return await self._fail_attempt(run, error, fetch)

    async def release(self, run: Run) -> None:
        # To the delayed set with no delay: the only script that consumes no attempt and counts no stall.
        await self._ledger.delayed(run, 0, consume=False, fields=None, fetch=False)
        self.released.append(run.job_id)
        self._events.emit("released", run.job)

    async def _retry_later(self, run: Run, error: RetryLater, fetch: bool) -> Found:
        fields = _failure(run.job, error, error.reason) if error.consume_attempt else None
        delay = max(0, round(error.delay * 1000))
        next_job = await self._ledger.delayed(run, delay, consume=error.consume_attempt, fields=fields, fetch=fetch)
        self._events.emit("delayed", run.job, error)
        return next_job

    async def _fail_attempt(self, run: Run, error: BaseException, fetch: bool) -> Found | None:
        job = run.job
        if job.discarded or job.attemptsMade + 1 >= (job.opts.get("attempts") or 1):
            return await self._fail(run, error, fetch)
        try:
            delay = self._backoff(job, error)
        except BaseException as unknown:  # e.g. a strategy that only Node knows; stock leaves such a job active
            reason = f"{describe(error)} (no retry: {describe(unknown)})"
            return await self._fail(run, FailPermanently(reason), fetch)
        if delay < 0:  # how a strategy says "no more"
            return await self._fail(run, error, fetch)
        fields, next_job = _failure(job, error), None
        if delay:
            next_job = await self._ledger.delayed(run, delay, consume=True, fields=fields, fetch=fetch)
        else:
            await self._ledger.waiting(run, fields)
        self._events.emit("failed", job, error)
        return next_job

    def _backoff(self, job: Job, error: BaseException) -> int:
        """Milliseconds before the next attempt, by BullMQ's rules."""
        if not (rule := job.opts.get("backoff")):
            return 0
        kind, delay, failures = rule.get("type"), rule.get("delay") or 0, job.attemptsMade + 1
        if kind == "exponential":
            delay = min(delay * 2 ** min(failures - 1, 64), LONGEST_BACKOFF)
        elif kind != "fixed":
            if self._backoff_strategy is None:
                raise ValueError(f"unknown backoff {kind!r}: give the worker a backoff_strategy")
            return min(int(self._backoff_strategy(failures, kind, error, job) or 0), LONGEST_BACKOFF)
        # A jitter of 0.25 takes up to a quarter off.
        return int(delay * (1 - (rule.get("jitter") or 0) * random.random()))

    async def _fail(self, run: Run, error: BaseException, fetch: bool) -> Found:
        fields = _failure(run.job, error)
        keep = run.job.opts.get("removeOnFail", self._keep_failed)
        next_job = await self._ledger.failed(run, fields["failedReason"], keep, fields, fetch=fetch)
        self._events.emit("failed", run.job, error)
        return next_job


def _as_json(run: Run, result: Any) -> str:
    try:
        return _encode(result)
    except (TypeError, ValueError, RecursionError) as error:
        # Stock counts this as a failed attempt and does the finished work again, three times in all.
        raise FailPermanently(
            f"the result of job {run.job_id} cannot be stored as JSON ({describe(error)}); the work itself was done. "
            "Return dict, list, str, number, bool or None."
        ) from error


def _failure(job: Job, error: BaseException, reason: str = "") -> dict[str, str]:
    """The fields BullMQ shows for a failed attempt. Bounded, and always encodable: a lone surrogate in a file
    name would otherwise break the very command that reports it."""
    if not reason:
        reason, kind = describe(error), type(error).__name__
        if not isinstance(error, Exception) and reason != kind:  # SystemExit says "1" and no more
            reason = f"{kind}: {reason}"
    limit = job.opts.get("stackTraceLimit", TRACES_KEPT)
    trace = getattr(error, "trace", None) or "".join(traceback.format_exception(error))
    traces = [*job.stacktrace, clean_text(trace[-MAX_TEXT:])]
    job.stacktrace = traces[-limit:] if limit else []
    job.failedReason = clean_text(reason)
    return {"failedReason": job.failedReason, "stacktrace": json.dumps(job.stacktrace)}

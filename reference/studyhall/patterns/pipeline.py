"""The one place where a job runs: every execution passes the same steps in the same order.

    size -> verify signature -> validate -> crash budget -> age -> database there? -> guards -> already done?
    -> work within its deadline -> effect, marker and result in one transaction -> one log line, one measurement
    -> acknowledge

Promise: at-least-once delivery, effectively-once effects. A crash at any step leads to another run; that run
finds the marker and returns the stored result, or finds nothing and does the work. The outcome is one
of `retry.Outcome`, and it is decided here and nowhere else. An outage of the database fails no job, however
long it lasts: it consumes no attempt, and `StoreGate` keeps the worker from taking job after job in vain. Only
a job whose own `max_age` passes meanwhile expires; its age is counted over two clocks, see `JobRequest`.

It does not hold for effects that a handler performs outside its `save` function: give those a provider
idempotency key (`ctx.provider_key("step")`) that the other side honours. `max_age` compares two clocks, the
worker's now and the due time that the producer wrote: it is off by as much as they differ, and a worker an hour
ahead drops everything that is worth less than an hour.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from bullmq import Job
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from . import checkpoint, claim_check, stall_budget, tracing
from .bullmq_worker import FailPermanently, RetryLater
from .cancel import CANCELLED, cancelled, marker, stop_reason
from .deadline import run_within
from .errors import InvalidDelay, Permanent, Transient, clean_text, describe
from .idempotency import Inbox, provider_key
from .observability import JobMetrics, correlation, log_execution
from .priority import priority_of
from .progress import Progress
from .redaction import redact_text
from .retry import Decision, Outcome, decide
from .schedule_slots import check_slot, signing_id
from .signed_payload import Signer
from .store import StoreUnavailable, begin, is_outage
from .store_gate import StoreGate
from .typed_jobs import JobType, JobTypes

__all__ = ["Done", "Expired", "Guard", "JobContext", "Pipeline", "Save"]

TRACE_LINES = 12  # of each exception in the chain: where it was raised, not the way through this file
Save = Callable[[AsyncConnection], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Done:
    """What a handler returns: its result, and the database effect that belongs to it."""

    result: Any = None
    save: Save | None = None


class Expired(Permanent):
    """The job waited longer than its result is worth. Raise its max_age, or add workers."""


@dataclass(slots=True)
class JobContext:
    """What a handler knows about its execution."""

    job: Job
    job_type: JobType[Any]
    key: str
    store: AsyncEngine
    progress: Progress
    services: Any
    started: float
    limit: float
    checkpointed: Any | None = None  # the last state that an earlier run saved
    _touched: bool = field(default=False, repr=False)  # there is a checkpoint to close

    @property
    def job_id(self) -> str:
        return str(self.job.id)

    @property
    def name(self) -> str:
        return self.job_type.name

    @property
    def attempt(self) -> int:
        return int(self.job.attemptsMade) + 1

    @property
    def attempts(self) -> int:
        return self.job_type.retry.attempts

    def remaining(self) -> float:
        """Seconds until the deadline stops this execution."""
        return max(0.0, self.started + self.limit - time.monotonic())

    def provider_key(self, step: str) -> str:
        """Idempotency key for a call to somebody else: the same for every attempt of this job."""
        return provider_key(self.scope, step)

    @property
    def scope(self) -> str:
        """The key within this type of job: the stages of one document have the same key."""
        return f"{self.name}/{self.key}"

    @property
    def fence(self) -> int:
        """The number of this run, higher than that of every earlier run of the job."""
        return checkpoint.fence(int(self.job.timestamp), int(self.job.attemptsStarted))

    async def checkpoint(self, state: Any, save: Save | None = None) -> None:
        """Remember where the work is; `save` puts the rows done so far into the same transaction."""
        async with begin(self.store) as tx:
            if save:
                await save(tx)
            await checkpoint.save(tx, self.scope, state, self.fence)
        self.checkpointed, self._touched = state, True

    async def children(self) -> dict[str, Any]:
        """Results of the jobs this one waited for, by their Redis key."""
        values: dict[str, Any] = await self.job.getChildrenValues()
        return values

    async def failed_children(self) -> dict[str, str]:
        """Children whose failure is ignored (see `flow`), by their Redis key: why they failed."""
        backend = self.job.queue.backend
        reasons: dict[str, str] = await backend.conn.hgetall(backend.toKey(f"{self.job.id}:failed"))
        return reasons


# Raises to stop the execution before its work. A context manager that it returns is held during the work.
Guard = Callable[[JobContext, Any], Awaitable[object]]


class Pipeline:
    """A BullMQ processor: `ReliableWorker(queue, Pipeline(...), url=...)`."""

    def __init__(
        self,
        jobs: JobTypes,
        store: AsyncEngine,
        *,
        signer: Signer | None = None,
        guards: Sequence[Guard] = (),
        services: Any = None,
        metrics: JobMetrics | None = None,
        crash_limit: int = stall_budget.CRASH_LIMIT,
        max_payload: int = claim_check.MAX_PAYLOAD,
        log: logging.Logger | None = None,
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._signer = signer
        self._guards = guards
        self._services = services
        self._metrics = metrics or JobMetrics()
        self._crash_limit = crash_limit
        self._max_payload = max_payload
        self._log = log or logging.getLogger("jobs")
        self._inboxes: dict[str, Inbox] = {}
        self._gate = StoreGate()

    async def __call__(self, job: Job, token: str) -> Any:
        started = time.perf_counter()
        waited = max(0.0, time.time() - _due(job))
        queue, meta = str(job.queue.name), _meta(job)
        with (
            correlation(meta.get("cid"), meta),
            tracing.executing(job.name, queue, str(job.id), job.attemptsMade + 1) as span,
        ):

            def ended(outcome: Outcome, error: BaseException | None = None) -> None:
                spent = time.perf_counter() - started
                tracing.ended(span, outcome, error)
                self._metrics.observe(queue, job.name, outcome, spent, waited)
                log_execution(
                    self._log,
                    job_id=job.id,
                    name=job.name,
                    queue=queue,
                    attempt=job.attemptsMade + 1,
                    outcome=outcome,
                    duration=spent,
                    error=error,
                )

            try:
                result, outcome = await self._execute_or_cancel(job, meta)
            except asyncio.CancelledError:
                ended(Outcome.RELEASED)  # the worker is draining or lost the lock; it knows which
                raise
            except BaseException as error:  # also what is no Exception: sys.exit(), a panic of Rust code
                decision = self._decide(job, error)
                ended(decision.outcome, error)
                raise _control(decision, error) from error
            ended(outcome)
            return result

    async def _execute_or_cancel(self, job: Job, meta: dict[str, Any]) -> tuple[Any, Outcome]:
        """A run that somebody cancelled has a result too."""
        try:
            return await self._execute(job, meta)
        except asyncio.CancelledError as stopped:
            if not _is_being_cancelled():
                raise Transient("the handler let a CancelledError escape that nobody asked for") from stopped
            if (reason := stop_reason(stopped)) is None:
                raise
        except BaseException as error:
            if self._decide(job, error).outcome is not Outcome.CANCELLED:
                raise
            reason = redact_text(describe(error))
        return await self._end_cancelled(job, reason)

    async def _execute(self, job: Job, meta: dict[str, Any]) -> tuple[Any, Outcome]:
        claim_check.check_size(job.data, self._max_payload)
        if self._signer:
            self._signer.verify(job.name, signing_id(job.id, job.data), job.data)
        job_type, payload = self._jobs.decode(job.name, job.data)
        check_slot(job.id, job.data)
        _check_options(job.opts)
        stall_budget.check(job.stalledCounter, self._crash_limit)
        _check_age(job, meta)
        async with self._gate.passage():
            return await self._guarded(job, job_type, payload)

    async def _guarded(self, job: Job, job_type: JobType[Any], payload: Any) -> tuple[Any, Outcome]:
        key, mark = marker(job.queue.name, job.id, job.data)
        limit = job_type.limit_for(job.attemptsMade + 1)
        ctx = JobContext(
            job,
            job_type,
            key,
            self._store,
            Progress(job.updateProgress),
            self._services,
            time.monotonic(),
            limit,
        )
        if not self._guards:
            return await self._run(ctx, payload, mark)
        async with AsyncExitStack() as holding:
            for guard in self._guards:
                hold = await guard(ctx, payload)
                if hold is not None and isinstance(hold, AbstractAsyncContextManager):
                    await holding.enter_async_context(hold)
            return await self._run(ctx, payload, mark)

    async def _run(self, ctx: JobContext, payload: Any, mark: str) -> tuple[Any, Outcome]:
        inbox, key, job_type = self._inbox(ctx.name), ctx.key, ctx.job_type
        if stored := await inbox.seen(key, mark):
            return stored.result, _outcome(stored.result, Outcome.DUPLICATE)
        if ctx.job.attemptsStarted != 1:  # a first start has nothing to resume, and nobody to shut out
            ctx.checkpointed = await checkpoint.claim(self._store, ctx.scope, ctx.fence)
            ctx._touched = True
        answer = await run_within(ctx.limit, job_type.handler, ctx, payload, name=ctx.name)
        await ctx.progress.flush()
        done = answer if isinstance(answer, Done) else Done(answer)
        result = await self._commit(inbox, key, mark, done, ctx)
        self._gate.back()
        return result, _outcome(result, Outcome.COMPLETED)

    async def _commit(self, inbox: Inbox, key: str, mark: str, done: Done, ctx: JobContext) -> Any:
        result = done.result.model_dump(mode="json") if isinstance(done.result, BaseModel) else done.result
        save = done.save
        if save is None and not ctx._touched:
            # Nothing but the result to store: it shares a transaction with other jobs that end now.
            return await inbox.record(key, mark, result)

        async def effect(tx: AsyncConnection) -> Any:
            if save:
                await save(tx)
            if ctx._touched:
                await checkpoint.close(tx, ctx.scope, ctx.fence)
            return result

        return await inbox.once(key, mark, effect)

    async def _end_cancelled(self, job: Job, reason: str) -> tuple[Any, Outcome]:
        """The marker decides: where the work is stored already it stands, else the cancellation does."""
        if (task := asyncio.current_task()) is not None:
            while task.cancelling():
                task.uncancel()
        key, mark = marker(job.queue.name, job.id, job.data)
        result = await self._inbox(job.name).record(key, mark, {CANCELLED: reason})
        return result, _outcome(result, Outcome.COMPLETED)

    def _inbox(self, consumer: str) -> Inbox:
        if consumer not in self._inboxes:
            self._inboxes[consumer] = Inbox(self._store, consumer)
        return self._inboxes[consumer]

    def _decide(self, job: Job, error: BaseException) -> Decision:
        job_type = self._jobs.find(job.name)
        policy = job_type.retry if job_type else None
        if is_outage(error) and not isinstance(error, StoreUnavailable):  # from an engine used past `begin`
            error = StoreUnavailable(describe(error))
        # BullMQ counts starts and consumed attempts: the difference is how often the job came back for free.
        waits = max(0, job.attemptsStarted - 1 - job.attemptsMade)
        decision = decide(
            error, policy, job.attemptsMade, age=time.time() - job.timestamp / 1000, waits=waits
        )
        return replace(decision, outcome=Outcome.EXPIRED) if isinstance(error, Expired) else decision


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _outcome(result: object, otherwise: Outcome) -> Outcome:
    return otherwise if cancelled(result) is None else Outcome.CANCELLED


def _meta(job: Job) -> dict[str, Any]:
    meta = job.data.get("meta") if isinstance(job.data, dict) else None
    return meta if isinstance(meta, dict) else {}


def _due(job: Job) -> float:
    # From its options: BullMQ sets `job.delay` to 0 when a delayed job becomes due.
    return float(job.timestamp + (job.opts.get("delay") or 0)) / 1000


def _check_options(opts: dict[str, Any]) -> None:
    """For jobs that were not added by `Producer`: bullmq for Python takes any priority and any delay."""
    if (priority := opts.get("priority")) is not None and priority != 0:
        priority_of(priority)
    if (opts.get("delay") or 0) < 0:
        raise InvalidDelay(f"delay {opts['delay']} ms: {InvalidDelay.__doc__}")


def _check_age(job: Job, meta: dict[str, Any]) -> None:
    max_age = meta.get("max_age")
    if isinstance(max_age, int | float):
        age = time.time() - _due(job)
        if age > max_age:
            raise Expired(f"waited {age:.0f} s, worth {max_age:g} s: {Expired.__doc__}")


def _control(decision: Decision, error: BaseException) -> Exception:
    reason = redact_text(decision.reason)  # it ends up in Redis, in the dead letters and on screens
    if not decision.consume_attempt:
        return RetryLater(decision.delay or 0.0, reason=reason)
    trace = redact_text(clean_text("".join(traceback.format_exception(error, limit=-TRACE_LINES))))
    if decision.delay is None:
        return FailPermanently(reason, trace=trace)
    return RetryLater(decision.delay, consume_attempt=True, reason=reason, trace=trace)

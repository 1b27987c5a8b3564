"""A BullMQ worker for Python with the speed of one round trip per job and without the stock worker's defects.

Promise
- A waiting job starts at once, a delayed one on time, also after hours of idling, after an outage of Redis
  (work is resumed within seconds of its return) and under a rate limit or a global concurrency limit.
- Jobs of a killed worker start elsewhere within `lock_duration + stalled_interval` (9 s by default).
- `drain()` stops taking jobs, keeps the locks while they finish, and gives the rest back without spending an
  attempt.
- No listener, no cancellation and no result can end the worker or leave a job active and unrun. `run()`
  returns after `drain()`, or raises; every other error reaches `on_error` (default: the log).
- A run that lost its lock (process stopped, loop hung, Redis away for longer than a lock) is cancelled and
  its outcome thrown away: it never counts as completed.

It does not make a processor run only once: a lost lock or a crash means that the job runs again. Use the
idempotency pattern for effects. Only Redis/Valkey from 6.2, no Cluster. Sync processors are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import json
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from bullmq.backends.redis_backend import RedisBackend
from bullmq.backoffs import Backoffs
from bullmq.custom_errors import DelayedError, UnrecoverableError, WaitingChildrenError
from bullmq.job import Job
from bullmq.job_scheduler import JobScheduler
from bullmq.redis_connection import RedisConnection
from redis.exceptions import AuthenticationError

from .bullmq_ledger import (
    NOTHING,
    FailPermanently,
    Found,
    Ledger,
    LockLost,
    Refused,
    RetryLater,
    Run,
    is_outage,
    json_result,
)
from .connections import blocking_client, worker_client
from .lock_keeper import LockKeeper

__all__ = ["FailPermanently", "LockLost", "ReliableWorker", "RetryLater"]

log = logging.getLogger(__name__)

POLL_SECONDS = (
    2.0  # longest wait for a marker; bounds the harm of a marker that another worker took to its grave
)
CLEANUP_SECONDS = 5.0  # what a cancelled processor gets to clean up
DRAINING = "the worker is draining"
LOCK_LOST = "the lock is lost"


class ReliableWorker:
    def __init__(
        self,
        queue: str,
        processor: Callable[[Job, str], Awaitable[Any]],
        *,
        url: str,
        concurrency: int = 50,
        lock_duration: float = 7.5,
        stalled_interval: float = 1.5,
        max_stalled: int = 1_000_000,
        hung_after: float = 30.0,
        limiter: dict[str, int] | None = None,
        name: str | None = None,
        prefix: str = "bull",
        on_error: Callable[[BaseException], None] | None = None,
        remove_on_complete: bool | int | dict[str, int] | None = None,
        remove_on_fail: bool | int | dict[str, int] | None = None,
    ) -> None:
        """`limiter` is BullMQ's {"max": jobs, "duration": ms}. `max_stalled` is high because a crash says
        little about the job it hit: count crashes where the budget is known. `hung_after`: see `LockKeeper`."""
        if not _is_async(processor):
            raise TypeError(
                "the processor must be `async def`; run blocking code in a thread or a subprocess"
            )
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self.name, self.prefix, self.concurrency = queue, prefix, concurrency
        self.id = uuid4().hex
        self._processor, self._on_error = processor, on_error
        self._keep = {"completed": remove_on_complete, "failed": remove_on_fail}

        client_name = f"{prefix}:{queue}" + (f":w:{name}" if name else "")
        self.client = worker_client(url, name=client_name)
        self._waiter = blocking_client(url, name=client_name)
        # A Job asks its queue for these four; this worker is the queue of its jobs.
        self.backend = RedisBackend(queue, RedisConnection(self.client), prefix=prefix)
        self.qualifiedName = self.backend.qualifiedName
        self.keys: dict[str, str] = self.backend.keys
        self.opts = {"lockDuration": int(lock_duration * 1000), "limiter": limiter, "prefix": prefix}

        self._ledger = Ledger(self.backend, int(lock_duration * 1000), limiter, self._outage)
        self._keeper = LockKeeper(
            url,
            self.keys,
            lock=lock_duration,
            check=stalled_interval,
            max_stalled=max_stalled,
            hung_after=hung_after,
            held=lambda: list(
                self._running.copy().values()
            ),  # copy() is atomic, iterating in another thread is not
            on_lost=self._lost,
            on_stalled=lambda job_id: self._emit("stalled", job_id),
            on_error=self._outage,
        )
        self._running: dict[str, Run] = {}
        self._listeners: dict[str, list[Callable[..., Any]]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._given_back: list[str] = []
        self._tokens = itertools.count(1)
        self._context = contextvars.Context()
        self._outage_reported = 0.0
        self._state = "new"
        self._slot_free, self._idle, self._stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._fetching, self._ready, self._closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `drain()`. Redis may be down at the start or later; wrong credentials raise."""
        if self._state != "new":
            raise RuntimeError(f"this worker is {self._state}; make a new one to run again")
        self._state = "running"
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        try:
            try:
                await self._first_contact()
                self._keeper.start()
                await self._fetch()
            finally:
                self._fetching.set()
            await self._closed.wait()
        except BaseException:
            await asyncio.shield(self._loop.create_task(self.drain(0)))
            raise
        finally:
            self._ready.set()  # nobody may wait for a worker that has ended

    async def ready(self) -> None:
        """Returns once connected and polling; raises if the worker ended before that."""
        await self._ready.wait()
        if self._state != "running":
            raise RuntimeError("the worker ended; see what run() raised")

    async def drain(self, grace: float) -> list[str]:
        """Take no more jobs, wait up to `grace` seconds for the running ones with their locks renewed, cancel
        the rest and give them back without spending an attempt. Then close. Returns the ids given back."""
        if self._state in ("draining", "closed"):
            await self._closed.wait()
            return list(self._given_back)
        fetched = self._state == "running"
        self._state = "draining"
        self._ledger.give_up_at = time.monotonic() + grace + CLEANUP_SECONDS
        self._stop.set()
        if fetched:
            await self._fetching.wait()
        await self._until_idle(grace)
        for run in list(self._running.values()):
            run.draining = True
            self._cancel(run, DRAINING)
        await self._until_idle(CLEANUP_SECONDS)
        for run in list(self._running.values()):
            self._report(
                RuntimeError(f"job {run.job_id} ignored its cancellation; it is given back while it runs")
            )
            await self._guard(self._give_back(run))
        # Its last BZPOPMIN may have taken the marker that should wake another worker: put one back.
        await self._guard(self.client.zadd(self.keys["marker"], {"0": 0}))
        await self._keeper.stop()
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        for client in (self._waiter, self.client):
            await self._guard(client.aclose())
        self._state = "closed"
        self._closed.set()
        self._emit("closed")
        return list(self._given_back)

    async def _until_idle(self, seconds: float) -> None:
        if self._running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    # -- what runs -------------------------------------------------------------------------------------------

    @property
    def active(self) -> Mapping[str, Job]:
        """The jobs this worker is running, by id."""
        return {job_id: run.job for job_id, run in self._running.items()}

    def cancel(self, job_id: str, reason: str) -> bool:
        """Cancel a running job; False if it does not run here. Its processor sees CancelledError(reason) and
        may raise something else, which then decides. If the cancellation escapes, the job fails for good."""
        run = self._running.get(job_id)
        if run is None or not run.processing:
            return False
        self._cancel(run, reason)
        return True

    def _cancel(self, run: Run, reason: str) -> None:
        run.cancelled = run.cancelled or reason

        def deliver() -> None:
            if run.processing and run.task is not None:
                run.task.cancel(reason)

        # Not at once: a processor may cancel itself and then return without another await.
        self._loop.call_soon(deliver)

    def _lost(self, run: Run) -> None:
        if run.processing and self._running.get(run.job_id) is run:  # else just finished: no lock to lose
            run.lost = True
            self._cancel(run, LOCK_LOST)

    # -- listeners and errors --------------------------------------------------------------------------------

    def on(self, event: str, listener: Callable[..., Any]) -> None:
        """active(job, prev), completed(job, result), failed(job, error), delayed(job, error), lost(job),
        given_back(job), stalled(job_id), error(error), closed(). Sync or async; their errors are reported."""
        self._listeners.setdefault(event, []).append(listener)

    def _emit(self, event: str, *args: Any) -> None:
        for listener in self._listeners.get(event, ()):
            try:
                answer = listener(*args)
            except Exception as error:
                self._report(error, tell_listeners=event != "error")
            else:
                if inspect.isawaitable(answer):
                    self._in_background(self._guard(answer, tell_listeners=event != "error"))

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)  # the loop keeps weak references only: without this it may be collected
        task.add_done_callback(self._background.discard)

    async def _guard(self, work: Awaitable[Any], *, tell_listeners: bool = True) -> None:
        try:
            await work
        except Exception as error:
            self._report(error, tell_listeners=tell_listeners)

    def _report(self, error: BaseException, *, tell_listeners: bool = True) -> None:
        try:
            if self._on_error is not None:
                self._on_error(error)
            else:
                log.error("queue %s: %s: %s", self.name, type(error).__name__, error, exc_info=error)
        except Exception:
            log.exception("queue %s: on_error itself failed on %r", self.name, error)
        if tell_listeners:
            self._emit("error", error)

    def _outage(self, error: BaseException) -> None:
        if time.monotonic() - self._outage_reported > 10:  # every try of every job would be a flood
            self._outage_reported = time.monotonic()
            self._report(error)

    # -- taking jobs -----------------------------------------------------------------------------------------

    async def _first_contact(self) -> None:
        async def version() -> str:
            try:
                return str((await self.client.info("server"))["redis_version"])
            except AuthenticationError as error:
                raise RuntimeError(f"Redis refused the credentials in the URL: {error}") from error

        found = await self._ledger.repeat(version)
        if tuple(int(part) for part in found.split(".")[:2]) < (6, 2):
            raise RuntimeError(f"Redis {found} is too old: BullMQ needs 6.2 or later")

    async def _fetch(self) -> None:
        """Fills free slots. A job's end fetches the next one by itself, so this is for ramp-up and idling."""
        while self._state == "running":
            if len(self._running) >= self.concurrency:
                self._slot_free.clear()
                await _first(self._slot_free, self._stop)
                continue
            token = f"{self.id}:{next(self._tokens)}"
            try:
                found = await self._ledger.take(token)
                self._ready.set()
                if found.fields is not None:
                    self._begin(found, token)
                else:
                    await self._wait_for_work(found)
            except Exception as error:
                self._outage(error) if is_outage(error) else self._report(error)
                await self._pause(0.5)

    async def _wait_for_work(self, found: Found) -> None:
        if (
            found.limited_ms
        ):  # the marker would be there at once: jobs wait, they are only not allowed to start
            await self._pause(found.limited_ms / 1000)
            return
        next_at = found.next_at_ms
        while self._state == "running":
            due = next_at / 1000 - time.time() if next_at else POLL_SECONDS
            marker = await self._next_marker(min(max(due, 0.002), POLL_SECONDS))
            if marker is None or marker <= time.time() * 1000:
                return
            next_at = marker  # the marker of a delayed job, not due yet

    async def _next_marker(self, seconds: float) -> float | None:
        # The reply is due within `seconds`; a network that swallowed it must not make us deaf for longer.
        wait = self._waiter.bzpopmin(self.keys["marker"], seconds)
        popped = asyncio.get_running_loop().create_task(asyncio.wait_for(wait, seconds + 3))
        stop = asyncio.get_running_loop().create_task(self._stop.wait())
        try:
            await asyncio.wait({popped, stop}, return_when=asyncio.FIRST_COMPLETED)
            if popped.done():
                answer = popped.result()
                return float(answer[2]) if answer else None
            return None
        finally:
            for task in (popped, stop):
                task.cancel()
            await asyncio.wait({popped, stop})

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    # -- one job ---------------------------------------------------------------------------------------------

    def _begin(self, found: Found, token: str) -> None:
        problem = None
        try:
            job = Job.fromJSON(self, found.fields, found.job_id)
            if not job.name:
                raise ValueError(
                    "it has no name: its data was evicted or removed, check maxmemory-policy noeviction"
                )
        except Exception as error:  # never let a job nobody can read come back for ever as stalled
            problem, job = f"unreadable job: {error}", Job(self, "", None, {}, found.job_id)
        job.token = token
        run = Run(job, found.job_id, token)
        if (
            old := self._running.get(run.job_id)
        ) is not None:  # lost, moved to waiting, and taken by us again
            self._lost(old)
        self._running[run.job_id] = run
        # A fresh copy of the context: what one job puts into context variables must not leak into the next.
        run.task = self._loop.create_task(self._execute(run, problem), context=self._context.copy())

    async def _execute(self, run: Run, problem: str | None) -> None:
        found: Found | None = NOTHING
        try:
            found = await self._process(run, problem)
            if found is None and self._state == "running":
                found = await self._ledger.take(run.token)  # that outcome's script hands out no next job
        except LockLost as error:
            self._report(error)
            self._emit("lost", run.job)
        except Exception as error:
            self._outage(error) if is_outage(error) else self._report(error)
        finally:
            run.processing = False
            if self._running.get(run.job_id) is run:
                del self._running[run.job_id]
            if found is not None and found.fields is not None:
                self._begin(found, run.token)
            else:
                self._slot_free.set()
            if not self._running:
                self._idle.set()

    async def _process(self, run: Run, problem: str | None) -> Found | None:
        job = run.job
        try:
            if problem is not None:
                raise FailPermanently(problem)
            if job.repeatJobKey:
                await self._guard(self._schedule_next(job))
            self._emit("active", job, "waiting")
            if job.deferredFailure:  # decided elsewhere: stalled too often, or a child failed
                raise FailPermanently(job.deferredFailure)
            try:
                result = await self._processor(job, run.token)
            finally:
                run.processing = False
            value = json_result(run.job_id, result)
            if run.lost:
                raise LockLost(
                    f"job {run.job_id} finished after its lock was lost; its result is thrown away"
                )
            keep = job.opts.get("removeOnComplete", self._keep["completed"])
            found = await self._ledger.completed(run, value, keep, fetch=self._state == "running")
        except LockLost:
            raise
        except (Exception, asyncio.CancelledError) as error:
            return await self._settle(run, error)
        job.returnvalue = result
        self._emit("completed", job, result)
        return found

    async def _settle(self, run: Run, error: BaseException) -> Found | None:  # noqa: PLR0911
        """Every way a run can end other than by completing."""
        assert run.task is not None
        foreign = run.cancelled is None and run.task.cancelling() > 0  # e.g. asyncio.run() is ending
        while run.task.cancelling():
            run.task.uncancel()
        if run.lost:
            raise LockLost(
                f"job {run.job_id} was stopped: its lock was lost, another worker may run it"
            ) from error
        fetch = self._state == "running"
        match error:
            case DelayedError() | WaitingChildrenError():  # the processor moved the job itself
                return None
            case RetryLater():
                fields = _failure(run.job, error, error.reason) if error.spend_attempt else None
                delay = max(0, round(error.delay * 1000))
                found = await self._ledger.delayed(
                    run, delay, spend=error.spend_attempt, fields=fields, fetch=fetch
                )
                run.job.attemptsMade += error.spend_attempt
                self._emit("delayed", run.job, error)
                return found
            case FailPermanently() | UnrecoverableError():
                return await self._fail(run, error, fetch)
            case _ if run.draining or foreign:
                await self._give_back(run)
                return None
            case asyncio.CancelledError() if run.cancelled is not None:
                return await self._fail(run, FailPermanently(f"cancelled: {run.cancelled}"), fetch)
            case asyncio.CancelledError():  # of the processor's own making; it ends a stock worker
                error = RuntimeError("the processor let a CancelledError escape that nobody asked for")
            case Refused() if error.code == -9:  # a child failed and the parent was told to fail with it
                return await self._fail(run, FailPermanently(str(error)), fetch)
        return await self._fail_attempt(run, error, fetch)

    async def _fail_attempt(self, run: Run, error: BaseException, fetch: bool) -> Found | None:
        job = run.job
        if job.discarded or job.attemptsMade + 1 >= (job.opts.get("attempts") or 1):
            return await self._fail(run, error, fetch)
        try:
            delay = await Backoffs.calculate(job.opts.get("backoff"), job.attemptsMade + 1, error, job, None)
        except Exception as unknown:  # stock leaves such a job active
            return await self._fail(run, FailPermanently(f"{error} (and its backoff: {unknown})"), fetch)
        fields, found = _failure(job, error), None
        if delay:
            found = await self._ledger.delayed(run, int(delay), spend=True, fields=fields, fetch=fetch)
        else:
            await self._ledger.waiting(run, fields)
        job.attemptsMade += 1
        self._emit("failed", job, error)
        return found

    async def _fail(self, run: Run, error: BaseException, fetch: bool) -> Found | None:
        fields = _failure(run.job, error)
        keep = run.job.opts.get("removeOnFail", self._keep["failed"])
        found = await self._ledger.failed(run, fields["failedReason"], keep, fields, fetch=fetch)
        self._emit("failed", run.job, error)
        return found

    async def _give_back(self, run: Run) -> None:
        # To the delayed ones with no delay: the only script that spends no attempt and counts no stall.
        await self._ledger.delayed(run, 0, spend=False, fields=None, fetch=False)
        self._given_back.append(run.job_id)
        self._emit("given_back", run.job)

    async def _schedule_next(self, job: Job) -> None:
        await self._ledger.repeat(
            lambda: JobScheduler(self).upsertJobScheduler(
                job.repeatJobKey,
                job.opts.get("repeat"),
                job.name,
                job.data,
                job.opts,
                override=False,
                producer_id=job.id,
            )
        )


def _failure(job: Job, error: BaseException, reason: str = "") -> dict[str, str]:
    """The fields BullMQ shows for a failed attempt. Bounded, and always encodable: a lone surrogate in a file
    name would otherwise break the very command that reports it."""
    limit = job.opts.get("stackTraceLimit", 10)
    traces = [*job.stacktrace, "".join(traceback.format_exception(error))]
    job.stacktrace = traces[-limit:] if limit else []
    job.failedReason = (reason or str(error) or type(error).__name__).encode("utf-8", "replace").decode()
    return {"failedReason": job.failedReason, "stacktrace": json.dumps(job.stacktrace)}


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _is_async(processor: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(processor) or inspect.iscoroutinefunction(
        getattr(processor, "__call__", None)  # noqa: B004
    )

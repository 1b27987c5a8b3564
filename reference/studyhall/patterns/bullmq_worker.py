"""A BullMQ worker for Python: one round trip per job, and none of the stock worker's measured defects.

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

The parts: `autopipeline` (speed), `lock_keeper` (locks, stalled jobs), `bullmq_ledger` (state changes),
`bullmq_outcomes` (what a processor's exception means), `worker_events` (listeners, errors).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import inspect
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from bullmq.backends.redis_backend import RedisBackend
from bullmq.job import Job
from bullmq.job_scheduler import JobScheduler
from bullmq.redis_connection import RedisConnection
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from .bullmq_ledger import Found, Ledger, LockLost, Run
from .bullmq_outcomes import FailPermanently, Outcomes, RetryLater
from .connections import blocking_client, worker_client
from .lock_keeper import LockKeeper
from .worker_events import WorkerEvents, is_outage

__all__ = ["FailPermanently", "LockLost", "ReliableWorker", "RetryLater"]

POLL_SECONDS = 2.0  # longest wait for a marker; bounds the harm of one that a dying worker took with it
WAITER_SECONDS = POLL_SECONDS + 3  # until the waiting connection counts as dead
CLEANUP_SECONDS = 5.0  # what a cancelled processor gets to clean up
FIRST_VERSION = "6.2.0"  # the oldest that works; assumed where INFO is refused
ACL_ADVICE = "what goes without and the ACL line that suffices are in connections.py"
DRAINING = "the worker is draining"
LOCK_LOST = "the lock is lost"

Keep = bool | int | dict[str, int] | None


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
        remove_on_complete: Keep = None,
        remove_on_fail: Keep = None,
    ) -> None:
        """`limiter` is BullMQ's {"max": jobs, "duration": ms}; `remove_on_…` are BullMQ's rules for jobs that
        bring none; None keeps all. `max_stalled` is high because a crash says little about the job it hit:
        count crashes where the budget is known. `hung_after`: see `LockKeeper`."""
        if not _is_async(processor):
            raise TypeError(
                "the processor must be `async def`; run blocking code in a thread or a subprocess"
            )
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self.name, self.prefix, self.concurrency = queue, prefix, concurrency
        self._processor = processor
        self._events = WorkerEvents(queue, on_error)
        self.on = self._events.on
        """`on(event, listener)`, sync or async: active(job, prev), completed(job, result),
        delayed(job, error), failed(job, error), lost(job), given_back(job), stalled(job_id), error(error),
        closed()."""

        # Dashboards count the connections that bear a queue's name, Node's in base64, Python's as it is: so there is
        # one of each, the waiter and the lock keeper.
        suffix = f":w:{name}" if name else ""
        self._waiter_name = _client_name(f"{prefix}:{base64.b64encode(queue.encode()).decode()}{suffix}")
        python_name = _client_name(f"{prefix}:{queue}{suffix}")
        self.client = worker_client(url, name=_client_name(f"{prefix}:{queue}:jobs"))
        # A network that swallows a reply must not make us deaf for longer than this, whatever was asked.
        self._waiter = blocking_client(url, name=self._waiter_name, patience=WAITER_SECONDS)
        # A Job asks its queue for these; this worker is the queue of its jobs.
        self.backend = RedisBackend(queue, RedisConnection(self.client), prefix=prefix)
        self.qualifiedName = self.backend.qualifiedName
        self.keys: dict[str, str] = self.backend.keys
        self.opts: dict[str, Any] = {"prefix": prefix}

        self._ledger = Ledger(self.backend, int(lock_duration * 1000), limiter, self._events.failure)
        self._outcomes = Outcomes(
            self._ledger, self._events, keep_completed=remove_on_complete, keep_failed=remove_on_fail
        )
        self._keeper = LockKeeper(
            url,
            self.keys,
            name=python_name,
            lock=lock_duration,
            check=stalled_interval,
            max_stalled=max_stalled,
            hung_after=hung_after,
            # From another thread: copy() is atomic, iterating is not.
            held=lambda: [run for run in self._running.copy().values() if not run.lost],
            on_lost=self._lost,
            on_stalled=lambda job_id: self._events.emit("stalled", job_id),
            on_error=self._events.failure,
        )
        self._running: dict[str, Run] = {}
        self._token_prefix, self._token_numbers = uuid4().hex, itertools.count(1)
        self._state = "new"
        self._may_unblock = True
        self._draining: asyncio.Task[None] | None = None
        self._stop, self._slot_free, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ready, self._fetched, self._closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # -- life ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `drain()`. Redis may be down at the start or later; wrong credentials raise."""
        if self._state != "new":
            raise RuntimeError(f"this worker is {self._state}; make a new one to run again")
        self._state = "running"
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        # In a task of its own, which is told to stop but never cancelled: a cancelled fetch would lose the job in
        # its reply, and a cancellation can vanish inside redis-py (seen on Python 3.11): run() went on.
        taking = self._loop.create_task(self._take_jobs(), name=f"jobs of {self.name}")
        try:
            await asyncio.shield(taking)
            await self._closed.wait()
        except BaseException:
            await self.drain(0)
            raise
        finally:
            self._ready.set()  # nobody may wait for a worker that has ended

    async def _take_jobs(self) -> None:
        try:
            await self._first_contact()
            self._keeper.start()
            await self._fetch()
        finally:
            self._fetched.set()

    async def ready(self) -> None:
        """Returns once connected and polling; raises if the worker ended before that."""
        await self._ready.wait()
        if self._state != "running":
            raise RuntimeError(f"the worker is {self._state}; see what run() raised")

    async def drain(self, grace: float) -> list[str]:
        """Take no more jobs, wait up to `grace` seconds for the running ones with their locks renewed, cancel
        the rest and give them back without spending an attempt. Then close. Returns the ids given back.
        A second call with less grace hurries the first one; cancelling a call does not stop the draining."""
        loop = asyncio.get_running_loop()
        if self._draining is None:
            self._draining = loop.create_task(self._drain(grace), name="drain")
        elif self._running:
            loop.call_later(grace, self._cancel_all)
        await asyncio.shield(self._draining)
        return list(self._outcomes.given_back)

    async def _drain(self, grace: float) -> None:
        was_running, self._state = self._state == "running", "draining"
        self._ledger.give_up_at = time.monotonic() + grace + CLEANUP_SECONDS
        self._stop.set()
        self._slot_free.set()
        if was_running:
            await self._fetched.wait()
        await self._until_idle(grace)
        self._cancel_all()
        await self._until_idle(CLEANUP_SECONDS)
        for run in list(self._running.values()):
            ignored = f"job {run.job_id} ignored its cancellation; it is given back although it still runs"
            self._events.report(RuntimeError(ignored))
            await self._events.guard(self._outcomes.give_back(run))
        if was_running and self._ready.is_set():
            # We may have taken a wake-up call and then no job: pass it on.
            await self._events.guard(self.client.zadd(self.keys["marker"], {"0": 0}))
        await self._keeper.stop()
        await self._events.finish(1.0)
        for client in (self._waiter, self.client):
            await self._events.guard(client.aclose())
        self._state = "closed"
        self._closed.set()
        self._events.emit("closed")

    async def _until_idle(self, seconds: float) -> None:
        if self._running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    # -- what runs -----------------------------------------------------------------------------------------

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
        if run.cancelled is not None:  # a second one would interrupt the clean-up after the first
            return
        run.cancelled = reason

        def deliver() -> None:
            if run.processing and run.task is not None:
                run.task.cancel(reason)

        # Not at once: a processor may cancel itself and then return without another await.
        self._loop.call_soon(deliver)

    def _cancel_all(self) -> None:
        for run in self._running.values():
            if run.cancelled is None:
                run.draining = True
                self._cancel(run, DRAINING)

    def _lost(self, run: Run) -> None:
        if run.processing and self._running.get(run.job_id) is run:  # else just finished: no lock to lose
            run.lost = True
            self._cancel(run, LOCK_LOST)

    # -- taking jobs ---------------------------------------------------------------------------------------

    async def _first_contact(self) -> None:
        while self._state == "running":
            try:
                await self._meet_server()
                return
            except AuthenticationError as error:
                raise RuntimeError(f"Redis refused the credentials in the URL: {error}") from error
            except Exception as error:
                if not is_outage(error):
                    raise
                self._events.failure(error)
                await self._pause(random.uniform(0.2, 0.6))

    async def _meet_server(self) -> None:
        # On the waiter, so that dashboards also count a worker that never had to wait.
        async with self._waiter.pipeline(transaction=False) as ask:
            ask.exists(self.keys["wait"], self.keys["active"])  # NoCluster, where a queue's keys lie apart
            ask.info("server")
            ask.client_setname(self._waiter_name)
            ask.client_id()
            ask.client_unblock(0)
            answers = await ask.execute(raise_on_error=False)
        if isinstance(answers[0], NoPermissionError):
            raise RuntimeError(f"Redis refuses this queue to the user in the URL: {answers[0]}; {ACL_ADVICE}")
        # By the ACL, or because a provider renamed the command.
        refused = [isinstance(answer, ResponseError) for answer in answers]
        version = FIRST_VERSION if refused[1] else str(answers[1]["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise RuntimeError(f"Redis {version} is too old: BullMQ needs 6.2 or later")
        self.backend.connection.version = version  # or BullMQ would ask for INFO itself
        self._may_unblock = not any(refused[3:])
        commands = ("EXISTS", "INFO", "CLIENT SETNAME", "CLIENT ID", "CLIENT UNBLOCK")
        if missing := ", ".join(name for name, no in zip(commands, refused, strict=True) if no):
            self._events.report(PermissionError(f"Redis refuses {missing} to this user; {ACL_ADVICE}"))

    async def _fetch(self) -> None:
        """Fills free slots. A job's end fetches the next one by itself, so this is for ramp-up and idling."""
        while self._state == "running":
            if len(self._running) >= self.concurrency:
                self._slot_free.clear()
                await self._slot_free.wait()
                continue
            token = f"{self._token_prefix}:{next(self._token_numbers)}"
            try:
                found = await self._ledger.take(token)
                if self._events.redis_answered():  # what cut our commands off has cut the waiter off too
                    await self._events.guard(self._waiter.connection_pool.disconnect())
                self._ready.set()
                if found.fields is not None:
                    self._begin(found, token)
                else:
                    await self._wait_for_work(found)
            except Exception as error:
                self._events.failure(error)
                await self._pause(random.uniform(0.2, 0.6))

    async def _wait_for_work(self, found: Found) -> None:
        if found.limited_ms:  # no use waiting for a marker: jobs are there, they may only not start yet
            await self._pause(found.limited_ms / 1000)
            return
        next_at = found.next_at_ms
        while self._state == "running":
            due = next_at / 1000 - time.time() if next_at else POLL_SECONDS
            score = await self._next_marker(min(max(due, 0.002), POLL_SECONDS))
            if score is None or score <= time.time() * 1000:
                return
            next_at = score  # the marker of a delayed job that is not due yet

    async def _next_marker(self, seconds: float) -> float | None:
        """Wait for BullMQ's wake-up call: its time of day in ms, 0 for "now", None if there was none."""
        connection_id = await self._waiter.client_id() if self._may_unblock else None
        pop: asyncio.Future[Any] = asyncio.ensure_future(self._waiter.bzpopmin(self.keys["marker"], seconds))
        try:
            # Redis looks at its timeouts ten times a second: a delayed job would start up to 100 ms late.
            early = seconds if seconds < POLL_SECONDS else None
            if connection_id is not None and await self._stopped_before(pop, early):
                # Hanging up would not do: until the server notices, it hands us the next wake-up call, which
                # another worker then misses (measured: every other job came 2 s late). So tell it first.
                await self.client.client_unblock(connection_id)
            answer = await pop
        finally:
            pop.cancel()
        return float(answer[2]) if answer else None

    async def _stopped_before(self, task: asyncio.Future[Any], seconds: float | None) -> bool:
        stop = self._loop.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
        stop.cancel()
        return not task.done()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    # -- one job -------------------------------------------------------------------------------------------

    def _begin(self, found: Found, token: str) -> None:
        problem = None
        try:
            job = Job.fromJSON(self, found.fields, found.job_id)
            if not job.name:
                raise ValueError("it has no name; was it evicted? Redis needs maxmemory-policy noeviction")
        except Exception as error:  # never let a job nobody can read come back for ever as stalled
            problem, job = f"unreadable job: {error}", Job(self, "unreadable", None, {}, found.job_id)
        job.token = token
        run = Run(job, found.job_id, token)
        if problem is not None:  # keep the evidence in a form that every tool can list
            run.repair = {"name": job.name, "data": json.dumps({"unreadable": found.fields}), "opts": "{}"}
        if (old := self._running.get(run.job_id)) is not None:  # lost, waiting again, and now taken by us
            self._lost(old)
        self._running[run.job_id] = run
        # A fresh copy of the context: what one job puts into context variables must not leak into the next.
        run.task = self._loop.create_task(self._execute(run, problem), context=self._context.copy())

    async def _execute(self, run: Run, problem: str | None) -> None:
        found: Found | None = None
        try:
            found = await self._process(run, problem)
            if found is None and self._state == "running":
                found = await self._ledger.take(run.token)  # that outcome's script hands out no next job
        except LockLost as error:
            self._events.report(error)
            self._events.emit("lost", run.job)
        except Exception as error:
            self._events.failure(error)
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
        if self._state != "running":  # its fetch was under way when the worker began to drain
            await self._outcomes.give_back(run)
            return None
        try:
            if problem is not None:
                raise FailPermanently(problem)
            if job.repeatJobKey:
                await self._events.guard(self._ledger.repeat(lambda: self._schedule_next(job)))
            self._events.emit("active", job, "waiting")
            if job.deferredFailure:  # decided elsewhere: stalled too often, or a child failed
                raise FailPermanently(job.deferredFailure)
            result = await self._processor(job, run.token)
            run.processing = False
            return await self._outcomes.complete(run, result, fetch=self._state == "running")
        except LockLost:
            raise
        except (Exception, asyncio.CancelledError) as error:
            run.processing = False
            return await self._outcomes.settle(run, error, fetch=self._state == "running")

    def _schedule_next(self, job: Job) -> Awaitable[Any]:
        """A job made by a job scheduler brings the next one about when it starts."""
        scheduler = JobScheduler(self)
        repeat = job.opts.get("repeat")
        more = {"override": False, "producer_id": job.id}
        return scheduler.upsertJobScheduler(  # type: ignore[no-any-return]
            job.repeatJobKey, repeat, job.name, job.data, job.opts, **more
        )


def _client_name(text: str) -> str:
    """CLIENT SETNAME takes printable ASCII without blanks; anything else would fail every connection."""
    return "".join(character if "!" <= character <= "~" else "_" for character in text)


def _is_async(processor: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(processor) or inspect.iscoroutinefunction(type(processor).__call__)

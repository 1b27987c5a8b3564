"""A BullMQ worker for Python: one round trip per job, and none of the stock worker's measured defects.

Promise
- A waiting job starts at once, a delayed one on time, also after hours of idling, after an outage of Redis
  (work is resumed within seconds of its return) and under a rate limit or a global concurrency limit.
- "On time" is by the clock of the Redis server: one machine whose clock is wrong starts nothing early or late.
- Jobs of a killed worker start elsewhere within `lock_duration + stalled_interval` (9 s by default).
- `drain()` stops taking jobs, keeps the locks while they finish, and releases the rest, which consumes no
  attempt.
- No listener, no cancellation, no result, nothing that a processor raises (sys.exit() and a panic of Rust code
  too) and no field of a foreign job can end the worker or leave a job active and unrun. `run()` returns after
  `drain()`, or raises; every other error reaches `on_error` (default: the log).
- A run that lost its lock (process stopped, loop hung, Redis away for longer than a lock) is cancelled and
  its outcome thrown away: it never counts as completed.

It does not make a processor run only once: a lost lock or a crash means that the job runs again. Use the
idempotency pattern for effects. sys.exit() in a task that the processor itself starts (TaskGroup, gather, and
on Python 3.11 wait_for) ends the process: asyncio raises it out of the loop. Its jobs come back as after any
crash, until a crash budget (`stall_budget`, or `max_stalled`) ends the culprit. An id whose Redis key is not a hash
is not a job: it is reported and removed from the queue. If it was delayed, BullMQ's script aborts after it has
removed all due jobs from their set: those are in no state, and only a reconciliation finds them. Needs Redis/Valkey
6.2 or later, not Cluster. Sync processors are refused.

The parts: `autopipeline` (speed), `locks` (renewal, stalled jobs), `ledger` (state changes), `reading` (jobs of any
origin), `outcomes` (what a processor's exception means), `events` (listeners, errors).
"""

import asyncio
import base64
import contextlib
import contextvars
import inspect
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from bullmq.abort_controller import AbortController, AbortSignal
from bullmq.backends.redis_backend import RedisBackend
from bullmq.job import Job
from bullmq.redis_connection import RedisConnection
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from ..core import bullmq_scheduler
from ..core.errors import FailPermanently, RetryLater
from ..core.worker_connections import blocking_client, worker_client
from .autopipeline import AutoPipeline
from .events import WorkerEvents, is_outage
from .ledger import Found, JobLedger, LockLost, Run, ServerClock
from .locks import LockKeeper
from .outcomes import BackoffStrategy, Outcomes
from .reading import Reading, read_job

__all__ = ["LOCK_LOST", "FailPermanently", "LockLost", "ReliableWorker", "RetryLater"]

POLL_SECONDS = 2.0  # longest wait for a marker; bounds the harm of one that a dying worker took with it
WAITER_SECONDS = POLL_SECONDS + 3  # until the waiting connection counts as dead
CLEANUP_SECONDS = 5.0  # what a cancelled processor gets to clean up
FIRST_VERSION = "6.2.0"  # the oldest that works; assumed where INFO is refused
ACL_ADVICE = "worker_connections.py says what works without, and which ACL line suffices"
DRAINING = "the worker is draining"
LOCK_LOST = "the lock is lost"  # with this reason a processor must stop at once: another worker may run the job

# The third argument is set when the run is cancelled.
Processor = Callable[[Job, str], Awaitable[Any]] | Callable[[Job, str, AbortSignal], Awaitable[Any]]
Keep = bool | int | dict[str, int] | None


class ReliableWorker:
    def __init__(
        self,
        queue: str,
        processor: Processor,
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
        on_error: Callable[[BaseException], Any] | None = None,
        remove_on_complete: Keep = None,
        remove_on_fail: Keep = None,
        backoff_strategy: BackoffStrategy | None = None,
        metrics: Mapping[str, int] | None = None,
    ) -> None:
        """`limiter` is BullMQ's {"max": jobs, "duration": ms}; `remove_on_…` are BullMQ's rules for jobs that
        bring none; None keeps all. `max_stalled` is high because a crash says little about the job it hit:
        count crashes where the budget is known. `hung_after`: see `LockKeeper`. `backoff_strategy(failures, type,
        error, job)` gives the ms for backoff types that are not BullMQ's own. `metrics` is BullMQ's
        {"maxDataPoints": minutes}. `name`: for dashboards, and to show who has which job."""
        if not _is_async(processor):
            raise TypeError("the processor must be `async def`; run blocking code in a thread or a subprocess")
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self.name, self.prefix, self.concurrency = queue, prefix, concurrency
        self._processor: Callable[..., Awaitable[Any]] = processor
        self._takes_signal = _takes_signal(processor)
        self._events = WorkerEvents(queue, on_error)
        self.off = self._events.off
        self.on = self._events.on
        """`on(event, listener)`, sync or async: active(job, prev), completed(job, result),
        delayed(job, error), failed(job, error), lost(job), released(job), stalled(job_id), error(error),
        paused(), resumed(), closed()."""

        # Dashboards count connections by the queue's name, Node's in base64, Python's as it is: so there is one of
        # each, the waiter and the lock keeper.
        suffix = f":w:{name}" if name else ""
        self._waiter_name = _client_name(f"{prefix}:{base64.b64encode(queue.encode()).decode()}{suffix}")
        python_name = _client_name(f"{prefix}:{queue}{suffix}")
        self.client = worker_client(url, AutoPipeline, name=_client_name(f"{prefix}:{queue}:jobs"))
        # A network that swallows a reply must not make us deaf for longer than this.
        self._waiter = blocking_client(url, name=self._waiter_name, patience=WAITER_SECONDS)
        # A Job asks its queue for these; this worker is the queue of its jobs.
        self.backend = RedisBackend(queue, RedisConnection(self.client), prefix=prefix)
        self.qualifiedName = self.backend.qualifiedName
        self.keys: dict[str, str] = self.backend.keys
        self.opts: dict[str, Any] = {"prefix": prefix}

        self._clock = ServerClock()
        lock_ms = int(lock_duration * 1000)
        self._ledger = JobLedger(self.backend, lock_ms, limiter, self._events.failure, self._clock, metrics, name)
        self._outcomes = Outcomes(
            self._ledger,
            self._events,
            keep_completed=remove_on_complete,
            keep_failed=remove_on_fail,
            backoff_strategy=backoff_strategy,
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
        self._state, self._paused = "new", False
        self._may_unblock = True
        self._fetching: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stop, self._slot_free, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._halt, self._parked, self._resumed = asyncio.Event(), asyncio.Event(), asyncio.Event()
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
        self._fetching = self._loop.create_task(self._take_jobs(), name=f"jobs of {self.name}")
        try:
            await asyncio.shield(self._fetching)
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
            self._parked.set()

    async def ready(self) -> None:
        """Returns once connected and polling; raises if the worker ended before that."""
        await self._ready.wait()
        if self._state != "running":
            raise RuntimeError(f"the worker is {self._state}; see what run() raised")

    async def pause(self, do_not_wait_active: bool = False) -> None:
        """Take no more jobs until `resume()`; wait for the running ones, unless told not to. This worker only: to
        pause the queue for all of them, `Queue.pause()`."""
        if not self._paused and self._state in ("new", "running"):
            self._paused = True
            self._resumed.clear()
            self._parked.clear()
            self._halt.set()
            self._slot_free.set()
        if self._ready.is_set() and not do_not_wait_active:
            await self._parked.wait()
            await self._until_idle(None)
        self._events.emit("paused")

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._halt.clear()
            self._resumed.set()
            self._events.emit("resumed")

    async def drain(self, grace: float) -> list[str]:
        """Take no more jobs, wait up to `grace` seconds for the running ones with their locks renewed, cancel
        and release the rest, which consumes no attempt. Then close. Returns the ids that were released.
        A second call with less grace hurries the first one; cancelling a call does not stop the draining."""
        loop = asyncio.get_running_loop()
        if self._draining is None:
            self._draining = loop.create_task(self._drain(grace), name="drain")
        elif self._running:
            loop.call_later(grace, self._cancel_all)
        await asyncio.shield(self._draining)
        return list(self._outcomes.released)

    async def _drain(self, grace: float) -> None:
        was_running, self._state = self._state == "running", "draining"
        self._halt.set()
        self._resumed.set()
        self._ledger.give_up_at = time.monotonic() + grace + CLEANUP_SECONDS
        self._stop.set()
        self._slot_free.set()
        if was_running:
            await self._fetched.wait()
        await self._until_idle(grace)
        self._cancel_all()
        await self._until_idle(CLEANUP_SECONDS)
        for run in list(self._running.values()):
            ignored = f"job {run.job_id} ignored its cancellation; it is released although it still runs"
            self._events.report(RuntimeError(ignored))
            await self._events.guard(self._outcomes.release(run))
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

    async def _until_idle(self, seconds: float | None) -> None:
        if self._running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()

    @property
    def _taking(self) -> bool:
        return self._state == "running" and not self._paused

    # -- what runs -----------------------------------------------------------------------------------------

    @property
    def active(self) -> Mapping[str, Job]:
        """The jobs this worker is running, by id."""
        return {job_id: run.job for job_id, run in self._running.items()}

    def cancel(self, job_id: str, reason: str) -> bool:
        """Cancel a running job; False if it does not run here. Its processor sees CancelledError(reason) and
        may raise something else, which then decides. If the cancellation escapes, the job fails for good.
        A processor that takes a signal is told by that, and gets the CancelledError only if it does not stop."""
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

        if run.abort is None:
            # Not at once: a processor may cancel itself and then return without another await.
            self._loop.call_soon(deliver)
        else:
            run.abort.abort(reason)
            self._loop.call_later(0 if run.lost else CLEANUP_SECONDS / 2, deliver)

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
                await self._clock.read(self.client)
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
            ask.exists(self.keys["wait"], self.keys["active"])  # NoCluster, if the queue's keys are spread
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
            if self._paused:
                # We may have taken a wake-up call and then no job: pass it on.
                await self._events.guard(self.client.zadd(self.keys["marker"], {"0": 0}))
                self._ready.set()
                self._parked.set()
                await self._resumed.wait()
                continue
            if len(self._running) >= self.concurrency:
                self._slot_free.clear()
                await self._slot_free.wait()
                continue
            token = f"{self._token_prefix}:{next(self._token_numbers)}"
            try:
                next_job = await self._ledger.take(token)
                if self._events.redis_answered():  # what cut our commands off has cut the waiter off too
                    await self._events.guard(self._waiter.connection_pool.disconnect())
                self._ready.set()
                if next_job.fields is not None:
                    self._begin(next_job, token)
                # After the job has begun: on an idle queue this look would be half of its wait.
                await self._clock.keep(self.client)
                if next_job.fields is None:
                    await self._wait_for_work(next_job)
            except Exception as error:
                self._events.failure(error)
                await self._pause(random.uniform(0.2, 0.6))

    async def _wait_for_work(self, next_job: Found) -> None:
        if next_job.limited_ms:  # no use waiting for a marker: there are jobs, which may not start yet
            await self._pause(next_job.limited_ms / 1000)
            return
        next_at = next_job.next_at_ms
        while self._state == "running":
            due = (next_at - self._clock.millis()) / 1000 if next_at else POLL_SECONDS
            score = await self._next_marker(min(max(due, 0.002), POLL_SECONDS))
            if score is None or score <= self._clock.millis():
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
        stop = self._loop.create_task(self._halt.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
        stop.cancel()
        return not task.done()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    # -- one job -------------------------------------------------------------------------------------------

    def _begin(self, next_job: Found, token: str) -> None:
        assert next_job.fields is not None
        reading = read_job(self, next_job.fields, next_job.job_id)
        reading.job.token = token
        run = Run(reading.job, next_job.job_id, token)
        if (old := self._running.get(run.job_id)) is not None:  # lost, waiting again, and now taken by us
            self._lost(old)
        self._running[run.job_id] = run
        # A fresh copy of the context: what one job puts into context variables must not leak into the next.
        run.task = self._loop.create_task(self._execute(run, reading), name=run.job_id, context=self._context.copy())

    async def _execute(self, run: Run, reading: Reading) -> None:
        next_job: Found | None = None
        try:
            next_job = await self._process(run, reading)
            if next_job is None and self._taking:
                next_job = await self._ledger.take(run.token)  # that outcome's script hands out no next job
        except LockLost as error:
            self._events.report(error)
            self._events.emit("lost", run.job)
        except Exception as error:
            self._events.failure(error)
        finally:
            run.processing = False
            if self._running.get(run.job_id) is run:
                del self._running[run.job_id]
            if next_job is not None and next_job.fields is not None:
                self._begin(next_job, run.token)
            else:
                self._slot_free.set()
            if not self._running:
                self._idle.set()

    async def _process(self, run: Run, reading: Reading) -> Found | None:
        job = run.job
        if reading.repairs:
            await self._ledger.repair(run, reading.repairs)
        if reading.ignored:
            ignored = f"job {job.id}: not of BullMQ's form, so ignored and repaired: {reading.ignored}"
            self._events.report(ValueError(f"{ignored}; look at who adds it"))
        if self._state != "running":  # its fetch was under way when the worker began to drain
            await self._outcomes.release(run)
            return None
        try:
            if reading.problem:
                raise FailPermanently(reading.problem)
            if job.repeatJobKey:
                await self._events.guard(self._ledger.repeat(lambda: self._advance(job)))
            self._events.emit("active", job, "waiting")
            if job.deferredFailure:  # decided elsewhere: stalled too often, or a child failed
                raise FailPermanently(job.deferredFailure)
            if self._takes_signal:
                run.abort = AbortController()
                result = await self._processor(job, run.token, run.abort.signal)
            else:
                result = await self._processor(job, run.token)
            run.processing = False
            return await self._outcomes.complete(run, result, fetch=self._taking)
        except LockLost:
            raise
        except BaseException as error:
            # sys.exit() in a library, a panic of Rust code (a BaseException): the job's fault like any other. If it
            # escaped, asyncio would end this loop, then the next worker's, over a job that nobody counts.
            run.processing = False
            # Our own coroutine is being closed: nothing can be awaited any more.
            if not self._loop.is_running():
                raise
            return await self._outcomes.settle(run, error, fetch=self._taking, loop_ends=self._loop_ends())

    def _loop_ends(self) -> bool:
        """asyncio.run() cancels every task at its end, and nobody else cancels these two. The job's own task says
        nothing: a TaskGroup of Python 3.11 whose child failed leaves it marked as cancelled."""
        return any(task is not None and task.cancelling() for task in (self._fetching, self._draining))

    async def _advance(self, job: Job) -> None:
        await bullmq_scheduler.advance(self.backend, job, self._clock.millis())


def _client_name(text: str) -> str:
    """CLIENT SETNAME takes printable ASCII without blanks; anything else would fail every connection."""
    return "".join(character if "!" <= character <= "~" else "_" for character in text)


def _takes_signal(processor: Callable[..., Any]) -> bool:
    """A third positional parameter, as in the stock worker."""
    kinds = [parameter.kind for parameter in inspect.signature(processor).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) > 2


def _is_async(processor: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(processor) or inspect.iscoroutinefunction(type(processor).__call__)

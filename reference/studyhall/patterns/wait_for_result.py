"""Wait for a job's end without a race, a leak or a hang.

Promise: `wait` returns the result if the job ends within `timeout`, whenever it ends: before the call, during
it, or so fast that no listener could have been attached. It listens first, then looks, then waits for the event,
and looks again every `poll` seconds in case an event was lost. A job that failed for good raises
`JobFailed`; one still running raises `StillRunning` (the job goes on, wait again). Whatever happens, the listener
is removed. A listener attached after the add saw none of 50 quick jobs.

Results are looked up in Redis, then in the database: retention removes a job from Redis while its result is
still in the idempotency marker, and failed jobs move to the dead letters. It does NOT hold when both are gone:
`JobUnknown`. While Redis or the database is away nothing is known, so the wait goes on: it ends with the result
once they are back, or with `StillRunning`, never with an error of theirs. Waiting holds a connection of your
caller: for more than some seconds let clients poll instead.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from .core.failures import Cancelled, JobError, Unavailable
from .core.job import cancelled
from .core.request import JobRef

__all__ = ["JobFailed", "JobUnknown", "Results", "StillRunning"]

UNKNOWN_FOR = 1.0  # seconds a job may be nowhere: accepted into the database, not queued yet
SHORTEST_LOOK = 1.0  # seconds for the database to answer, even for a caller who does not wait
_RUNNING = object()
_NOWHERE = object()


class JobFailed(JobError):
    """The job failed for good. Its reason is in the message; replay it from the dead letters."""


class StillRunning(JobError):
    """Not ended yet. Nothing is lost: the job goes on, ask again later."""


class JobUnknown(JobError):
    """No trace of this job: never enqueued, or ended so long ago that its result is forgotten too."""


class Stream(Protocol):
    """Tells when a job ends; `progress_stream.ProgressStream` is one."""

    def ending(self, queue: str, job_id: str) -> AbstractContextManager[asyncio.Event]: ...


class Kept(Protocol):
    @property
    def result(self) -> Any: ...


class Results:
    """One per process, on the process's `ProgressStream`.

    `stored` and `failed` look into the database for jobs that have left Redis: `idempotency.result_of(store)` and
    `dead_letter.reason_of(store)`.
    """

    def __init__(
        self,
        stream: Stream,
        redis: Redis,
        *,
        stored: Callable[[JobRef], Awaitable[Kept | None]] | None = None,
        failed: Callable[[JobRef], Awaitable[str | None]] | None = None,
        prefix: str = "bull",
    ) -> None:
        self._stream, self._redis, self._prefix = stream, redis, prefix
        self._kept, self._failed = stored, failed

    async def wait(self, ref: JobRef, *, timeout: float, poll: float = 1.0) -> Any:
        """The job's result. Raises `JobFailed`, `Cancelled`, `StillRunning` or `JobUnknown`."""
        start, task = time.monotonic(), asyncio.current_task()
        # Not 0 after a TaskGroup of the caller whose child failed (Python before 3.13).
        before = task.cancelling() if task is not None else 0
        with self._stream.ending(ref.queue, ref.id) as ended:
            while True:
                result = await self._look(ref, timeout - (time.monotonic() - start))
                if task is not None and task.cancelling() > before:
                    # A cancellation can vanish inside redis-py (seen on 3.11): some of 105 waited on for a minute.
                    raise asyncio.CancelledError
                spent = time.monotonic() - start
                if result is _NOWHERE and spent >= UNKNOWN_FOR:
                    raise JobUnknown(f"{ref.queue}/{ref.id}: {JobUnknown.__doc__}")
                if result is not _RUNNING and result is not _NOWHERE:
                    if (reason := cancelled(result)) is not None:
                        raise Cancelled(reason)
                    return result
                if spent >= timeout:
                    raise StillRunning(f"{ref.queue}/{ref.id} after {timeout:g} s: {StillRunning.__doc__}")
                nap = min(poll, timeout - spent, 0.1 if result is _NOWHERE else poll)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(nap):
                        await ended.wait()
                ended.clear()

    async def _look(self, ref: JobRef, left: float) -> Any:
        base, client = f"{self._prefix}:{ref.queue}:", self._redis
        try:
            async with client.pipeline(transaction=True) as pipe:
                pipe.zscore(f"{base}completed", ref.id).zscore(f"{base}failed", ref.id)  # type: ignore[attr-defined]
                pipe.hmget(base + ref.id, "returnvalue", "failedReason", "name")
                done, failed, (value, reason, name) = await pipe.execute()
        except (RedisError, OSError):
            stored = await self._stored(ref, left)
            return _RUNNING if stored is _NOWHERE else stored
        if done is not None:
            return json.loads(value or "null")
        if failed is not None:
            raise JobFailed(f"{ref.queue}/{ref.id}: {reason}")
        return _RUNNING if name is not None else await self._stored(ref, left)

    async def _stored(self, ref: JobRef, left: float) -> Any:
        try:
            # Many waiters share few connections; the last of them must not get its answer after its time.
            async with asyncio.timeout(max(left, SHORTEST_LOOK)):
                return await self._in_store(ref)
        except (Unavailable, TimeoutError):
            return _RUNNING

    async def _in_store(self, ref: JobRef) -> Any:
        if self._kept is not None and (kept := await self._kept(ref)) is not None:
            return kept.result
        if self._failed is not None and (reason := await self._failed(ref)) is not None:
            raise JobFailed(f"{ref.queue}/{ref.id}: {reason}")
        return _NOWHERE

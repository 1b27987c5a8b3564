"""Cancel a job that waits, is delayed, or runs right now in another process; it never comes back.

Promise: the cancellation is written where the job's effect would be written, as its idempotency marker, and
the first of the two wins. So a job ends either done (`too-late`: it was finished before) or cancelled without
its database effect, never both, and whatever happens afterwards (a crash, a retry, a stalled job that returns,
a second delivery) finds the marker and does nothing. A running job is stopped within about a second. The
other jobs of its flow are cancelled with it: what waits for it could never run.

How it ends in BullMQ: completed, with the result `{"cancelled": reason}` (`cancelled(result)` reads it). Not
failed: a failed job is swept into the dead letters, raises alerts, is retried by "retry all", and keeps the
parents of its flow waiting forever. Its log line and metrics say `cancelled`.

When it does NOT hold
- Effects outside the database that happened before: undo them in `except asyncio.CancelledError` of the
  handler (`raise` afterwards), or make them steps of a saga. What checkpoints have saved stays.
- A job that is not run by `Pipeline` (which looks for the marker), or whose marker was purged.
- The job keeps its place in the queue until a worker reaches it; its effect is ruled out at once.
"""

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bullmq import Queue
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from .core.clock import Periodic
from .core.failures import JobError
from .core.job import CANCELLED, STOP, cancelled
from .idempotency import Inbox, fingerprint

__all__ = ["CancelWatcher", "Cancellation", "NoSuchJob", "cancel", "rule_out"]

log = logging.getLogger("cancel")
MEMORY = 24 * 3600  # seconds that a request to stop waits for a worker to notice
LARGEST_FLOW = 1_000


class NoSuchJob(JobError):
    """There is no such job in Redis: never enqueued, finished and forgotten, or the id is wrong."""


@dataclass(frozen=True, slots=True)
class Cancellation:
    """`cancelled`: it will not take effect. `stopping`: the same, and it runs right now. `too-late`: done."""

    queue: str
    job_id: str
    state: Literal["cancelled", "stopping", "too-late"]
    reason: str


async def rule_out(
    store: AsyncEngine, queue: str, name: str, job_id: str, key: str | None, payload: object, reason: str
) -> Cancellation:
    """Write the marker alone: from now on the job has no effect, whatever its state."""
    place = key or f"{queue}/{job_id}"
    recorded = await Inbox(store, name).record(place, fingerprint(payload), {CANCELLED: reason})
    if cancelled(recorded) is None:
        return Cancellation(queue, job_id, "too-late", "the job had done its work")
    return Cancellation(queue, job_id, "cancelled", reason)


async def cancel(
    redis: Redis, store: AsyncEngine, queue: str, job_id: str, reason: str, *, prefix: str = "bull"
) -> list[Cancellation]:
    """Cancel the job and the unfinished rest of its flow, the last stage first, so that none starts meanwhile."""
    reason = reason.strip()[:500] or "no reason given"
    client: Any = redis  # redis-py types every answer as text or bytes; ours are decoded
    root = f"{prefix}:{queue}:{job_id}"
    data, parent = await client.hmget(root, "data", "parentKey")
    if data is None:
        raise NoSuchJob(f"{queue}/{job_id}: {NoSuchJob.__doc__}")
    while parent:
        root, parent = parent, await client.hget(parent, "parentKey")
    keys: list[str] = []
    level = [root]
    while level and len(keys) < LARGEST_FLOW:
        keys += level
        level = [child for key in level for child in await client.smembers(f"{key}:dependencies")]
    return [done for key in keys if (done := await _cancel_one(client, store, key, reason, prefix))]


async def _cancel_one(redis: Any, store: AsyncEngine, key: str, reason: str, prefix: str) -> Cancellation | None:
    queue, _, job_id = key.removeprefix(f"{prefix}:").partition(":")
    name, text = await redis.hmget(key, "name", "data")
    if text is None:
        return None  # finished and forgotten while we looked
    data = json.loads(text)
    done = await rule_out(store, queue, name, job_id, data.get("key"), data["payload"], reason)
    if done.state == "too-late":
        return done
    base = f"{prefix}:{queue}:"
    async with redis.pipeline(transaction=False) as batch:
        # For the worker that runs it, now or later.
        batch.hset(f"{base}cancel", job_id, reason).expire(f"{base}cancel", MEMORY)
        batch.lpos(f"{base}active", job_id).zscore(f"{base}delayed", job_id)
        _, _, running, due = await batch.execute()
    if running is not None:
        return Cancellation(queue, job_id, "stopping", reason)
    if due is not None:  # let a worker end it now, not next week
        # Only here: a Queue reads 35 scripts from disk and asks for the version, most of a cancellation's time.
        with contextlib.suppress(Exception):  # it has just left the delayed set
            job: Any = await Queue(queue, {"connection": redis, "prefix": prefix}).getJob(job_id)
            await job.promote()
    return done


class _Worker(Protocol):
    name: str
    prefix: str

    @property
    def active(self) -> Mapping[str, Any]: ...
    def cancel(self, job_id: str, reason: str) -> bool: ...


class CancelWatcher(Periodic):
    """Stops jobs that run here and were cancelled elsewhere. One per worker process; drains like a worker."""

    def __init__(self, redis: Redis, workers: Sequence[_Worker], *, every: float = 0.5) -> None:
        super().__init__("looking for cancelled jobs", self._look_at_all, every=every)
        self._redis: Any = redis
        self._workers = workers

    async def _look_at_all(self) -> None:
        for worker in self._workers:
            if running := list(worker.active):
                # A poll, not pub/sub: a message sent while the connection is being restored is lost.
                reasons = await self._redis.hmget(f"{worker.prefix}:{worker.name}:cancel", running)
                for job_id, reason in zip(running, reasons, strict=True):
                    if reason is not None:
                        worker.cancel(job_id, STOP + reason)

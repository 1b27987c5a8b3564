"""Do it later: a delayed job, which can be moved or withdrawn until it starts.

Promise: a job enqueued with `delay=after(…)` or `delay=at(…)` occupies nothing but its place in Redis,
survives every restart, and starts on time: within 150 ms for 95 of 100 on an idle `ReliableWorker` (the
stock worker rounds up to whole seconds, and is minutes late when redis-py's default timeout cuts its wait
short). `reschedule` moves it, `withdraw` removes it as if it had never been enqueued; both are atomic: they
find it waiting, or say that it has started. To stop one that may have started, use `cancel`.

Clocks: a `ReliableWorker` judges what is due by the clock of the Redis server, so its own may be wrong. The due
time is written by the producer: with `at` it is that moment whatever the producer's clock says, with `after` it is
off by as much as that clock differs from the server's.

When it does NOT hold: with all slots busy, or no worker, it is late. A stock worker whose clock is ahead starts it
early by as much. A producer whose clock is ahead refuses an `at` that looks past. A delay is not a
schedule: for something that recurs, use `schedule`.
"""

import math
import time
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Protocol

from redis.asyncio import Redis

from .core.failures import InvalidDelay, JobError
from .core.job import DAY
from .core.request import JobRef

__all__ = ["AlreadyStarted", "after", "at", "due_at", "reschedule", "withdraw"]

MAX_DELAY = 366 * DAY
SLACK = 1.0  # a moment that passed while the request was on its way means "now"

# What BullMQ's changeDelay does on Node; bullmq for Python does not offer it. The due time also goes into the
# options, because BullMQ forgets the delay when the job becomes due and "waited since" is counted from there.
_RESCHEDULE = """
local delayed, job, marker, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, due = ARGV[1], tonumber(ARGV[2])
if redis.call('ZREM', delayed, id) == 0 then return 0 end
local delay = math.max(0, due - tonumber(redis.call('HGET', job, 'timestamp')))
local opts = cjson.decode(redis.call('HGET', job, 'opts'))
opts['delay'] = delay
redis.call('HSET', job, 'delay', delay, 'opts', cjson.encode(opts))
redis.call('ZADD', delayed, due * 0x1000, id)
local first = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
redis.call('ZADD', marker, math.floor(tonumber(first[2]) / 0x1000), '1')
redis.call('XADD', events, 'MAXLEN', '~', 10000, '*', 'event', 'delayed', 'jobId', id, 'delay', due)
return 1
"""


class _Producer(Protocol):
    """What is needed of a producer."""

    redis: Redis

    def queue(self, name: str) -> Any: ...
    def bounded(self) -> AbstractAsyncContextManager[None]: ...


class AlreadyStarted(JobError):
    """The job is not waiting for its time any more: it has started, or ended. Use `cancel` to stop it."""


def after(*, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> float:
    """A delay in seconds, checked."""
    return _checked(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def at(moment: datetime, *, now: float | None = None) -> float:
    """The delay until that moment, which needs a time zone: 09:00 differs between servers."""
    if moment.tzinfo is None:
        raise InvalidDelay(f"{moment.isoformat()} has no time zone: say which, for example tzinfo=UTC")
    delay = moment.timestamp() - (time.time() if now is None else now)
    return 0.0 if -SLACK <= delay < 0 else _checked(delay)


async def reschedule(producer: _Producer, ref: JobRef, delay: float) -> None:
    """Let the waiting job start `delay` seconds from now instead."""
    queue = producer.queue(ref.queue)
    due = round((time.time() + _checked(delay)) * 1000)
    keys = [queue.toKey("delayed"), queue.toKey(ref.id), queue.toKey("marker"), queue.toKey("events")]
    async with producer.bounded():
        moved: Any = await producer.redis.eval(_RESCHEDULE, len(keys), *keys, ref.id, str(due))
    if not moved:
        raise AlreadyStarted(f"{ref.id}: {AlreadyStarted.__doc__}")


async def withdraw(producer: _Producer, ref: JobRef) -> None:
    """Remove the delayed or waiting job. Its key may be used again."""
    queue = producer.queue(ref.queue)
    async with producer.bounded():
        state = await queue.getJobState(ref.id)
        # BullMQ's own removal is atomic and refuses a job that runs; a finished one is not ours to remove.
        removed: Any = await queue.remove(ref.id) if state in ("delayed", "waiting", "prioritized") else 0
    if not removed:
        raise AlreadyStarted(f"{ref.id} is {state}: {AlreadyStarted.__doc__}")


async def due_at(producer: _Producer, ref: JobRef) -> float | None:
    """When the delayed job will start, in seconds since 1970; None if it is not delayed."""
    async with producer.bounded():
        score = await producer.redis.zscore(producer.queue(ref.queue).toKey("delayed"), ref.id)
    return None if score is None else score // 0x1000 / 1000


def _checked(delay: float) -> float:
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not math.isfinite(delay):
        raise InvalidDelay(f"delay {delay!r}: {InvalidDelay.__doc__}")
    if not 0 <= delay <= MAX_DELAY:
        raise InvalidDelay(f"delay {delay!r}: {InvalidDelay.__doc__}")
    return float(delay)

"""Fan-out: one event becomes one job in each of its queues, all of them or none.

Promise: the deliveries are rows of the caller's transaction, one per queue, so all queues will get the job
or none will, whatever dies in between. A caller that retries adds nothing (same event id), a relay that
retries adds nothing (job id = queue + event id), so each queue ends with exactly one job. Every queue has
its own relay: one that is down or slow delays no other. The consumer's side is `deliver`.

When it does NOT hold
- "All" is eventual: while a queue is down its job waits in the outbox, and the others run.
- BullMQ remembers a job id as long as the job is retained. A relay killed between add and mark adds it
  again; if the job has run and left Redis by then, the consumer's inbox is what stops the second effect.
- An event that is added again while its job is retained runs nothing: the log says so, and whether the job
  failed. To run it again, retry the job.
- The caller must retry with the SAME event id: derive it from the business request, never from `uuid4`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bullmq import Queue
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection

from .core.errors import FailPermanently, RetryLater
from .core.event import BrokerUnavailable, Event, Handler, UnknownEventType
from .core.job import RetryPolicy
from .core.redaction import redact_text
from .job_ids import job_id
from .outbox import add
from .retry import decide, forever

__all__ = ["FanOut", "QueuePublisher", "deliver", "destination_of", "event_job", "event_of"]

log = logging.getLogger("fan_out")
Job = dict[str, Any]  # what BullMQ's addBulk takes: name, data, opts
KEEP = {"removeOnComplete": {"age": 24 * 3600, "count": 10_000}, "removeOnFail": {"age": 14 * 24 * 3600}}
# For workers that know no policy, such as Node's: pauses double from a second, 36 hours in all.
RETRIES = {"attempts": 18, "backoff": {"type": "exponential", "delay": 1000}}


def destination_of(queue: str) -> str:
    """The outbox destination that holds this queue's deliveries."""
    return f"queue.{queue}"


def event_job(queue: str, event: Event) -> Job:
    """The job an event becomes. For another shape give `publishers` a function of your own; keep the id."""
    return {
        "name": event.name,
        "data": event.model_dump(mode="json", exclude_none=True),
        "opts": {"jobId": job_id(queue, event.id), **RETRIES, **KEEP},
    }


def event_of(data: Any) -> Event:
    """The event in the data of its job."""
    return Event.decode(json.dumps(data))


def deliver(
    handle: Handler, policy: RetryPolicy | None = None, read: Callable[[Any], Event] = event_of
) -> Callable[[Any, str], Awaitable[None]]:
    """The consumer's side: a processor for `ReliableWorker(queue, deliver(handle), url=url)`.

    An error is retried by `policy` (by default without end); a `Permanent` one fails the job, where
    people find it and retry it. The events of one subject may run side by side, and in any order after an error.
    """
    policy = policy or forever()

    async def process(job: Any, token: str) -> None:
        try:
            await handle(read(job.data))
        except Exception as error:  # not CancelledError: the worker drains or lost the lock
            waits = max(0, job.attemptsStarted - 1 - job.attemptsMade)
            age = time.time() - job.timestamp / 1000
            then = decide(error, policy, job.attemptsMade, age=age, waits=waits)
            why = redact_text(then.reason)
            if then.delay is None:
                raise FailPermanently(why, trace=why) from error
            raise RetryLater(then.delay, consume_attempt=then.consume_attempt, reason=why, trace=why) from error

    return process


class FanOut:
    """`routes`: event name without version (`order.placed`) → the queues that get it."""

    def __init__(self, routes: Mapping[str, Sequence[str]]) -> None:
        self._routes = {name: tuple(dict.fromkeys(queues)) for name, queues in routes.items()}

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(queue for queues in self._routes.values() for queue in queues))

    async def add(self, tx: AsyncConnection, event: Event) -> int:
        """In the caller's transaction. Returns the deliveries added: 0 when the event was there already."""
        if not (queues := self._routes.get(event.name)):
            raise UnknownEventType(f"{event.name!r} has no queues: add a route, or publish it on the bus")
        return await add(tx, event, to=[destination_of(queue) for queue in queues])

    def publishers(
        self, open_queue: Callable[[str], Queue], job: Callable[[str, Event], Job] = event_job
    ) -> dict[str, QueuePublisher]:
        """By destination: make each of them an outbox `Relay`, here or in several processes.

        [Relay(store, publisher, destination=to) for to, publisher in fan_out.publishers(open_queue).items()]
        """
        return {destination_of(name): QueuePublisher(open_queue(name), job) for name in self.queues}


class QueuePublisher:
    """Puts events into one BullMQ queue. Give the queue a client that fails fast (`producer_client`)."""

    def __init__(self, queue: Queue, job: Callable[[str, Event], Job] = event_job) -> None:
        self._queue = queue
        self._job = job

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        jobs = [self._job(self._queue.name, event) for event in events]
        try:
            await self._report_retained([job["opts"]["jobId"] for job in jobs])
            # One MULTI: after an error none was added, or the answer was lost; the ids make a repeat harmless.
            await self._queue.addBulk(jobs)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"queue {self._queue.name}: {error}") from error
        return [None] * len(events)

    async def _report_retained(self, ids: Sequence[str]) -> None:
        """BullMQ silently ignores an id that it still has, even that of a failed job."""
        async with self._queue.client.pipeline(transaction=False) as pipe:
            for ident in ids:
                pipe.hget(self._queue.toKey(ident), "finishedOn")
                pipe.zscore(self._queue.toKey("failed"), ident)
            replies = await pipe.execute()
        for ident, finished, failed in zip(ids, replies[::2], replies[1::2], strict=True):
            if failed:
                log.warning("queue %s: %s failed before, nothing was added: retry the job", self._queue.name, ident)
            elif finished:
                log.info("queue %s: %s ran before, nothing was added", self._queue.name, ident)

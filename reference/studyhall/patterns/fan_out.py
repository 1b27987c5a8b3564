"""Fan-out: one event becomes one job in each of its queues, all of them or none.

Promise: the deliveries are rows of the caller's transaction, one per queue, so all queues will get the job
or none will, whatever dies in between. A caller that retries adds nothing (same event id), a relay that
retries adds nothing (job id = queue + event id), so each queue ends with exactly one job. Every queue has
its own relay: one that is down or slow delays no other.

When it does NOT hold
- "All" is eventual: while a queue is down its job waits in the outbox, and the others run already.
- BullMQ remembers a job id as long as the job is retained. A relay killed between add and mark adds it
  again; if the job has run and left Redis by then, the consumer's inbox is what stops the second effect.
- The caller must retry with the SAME event id: derive it from the business request, never from `uuid4`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bullmq import Queue
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection

from .core.event import BrokerUnavailable, Event, UnknownEventType
from .job_ids import job_id
from .outbox import add

__all__ = ["FanOut", "QueuePublisher", "destination_of", "event_job"]

Job = dict[str, Any]  # what BullMQ's addBulk takes: name, data, opts
KEEP = {"removeOnComplete": {"age": 24 * 3600, "count": 10_000}, "removeOnFail": {"age": 14 * 24 * 3600}}


def destination_of(queue: str) -> str:
    """The outbox destination that holds this queue's deliveries."""
    return f"queue.{queue}"


def event_job(queue: str, event: Event) -> Job:
    """The job an event becomes. Replace it when your worker expects another shape; keep the id."""
    retries = {"attempts": 5, "backoff": {"type": "exponential", "delay": 1000}}
    return {
        "name": event.name,
        "data": event.model_dump(mode="json", exclude_none=True),
        "opts": {"jobId": job_id(queue, event.id), **retries, **KEEP},
    }


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

    def publishers(self, open_queue: Callable[[str], Queue]) -> dict[str, QueuePublisher]:
        """By destination: make each of them an outbox `Relay`, here or in several processes.

        [Relay(store, publisher, destination=to) for to, publisher in fan_out.publishers(open_queue).items()]
        """
        return {destination_of(name): QueuePublisher(open_queue(name)) for name in self.queues}


class QueuePublisher:
    """Puts events into one BullMQ queue. Give the queue a client that fails fast (`producer_client`)."""

    def __init__(self, queue: Queue, job: Callable[[str, Event], Job] = event_job) -> None:
        self._queue = queue
        self._job = job

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        try:
            # One MULTI: with an error none is there, or the answer got lost; the ids make a repeat harmless.
            await self._queue.addBulk([self._job(self._queue.name, event) for event in events])
        except (RedisConnectionError, RedisTimeoutError) as error:
            raise BrokerUnavailable(f"queue {self._queue.name}: {error}") from error
        return [None] * len(events)

"""One member of a RabbitMQ consumer group whose handlers outlive its connection.

Promise: at most `concurrency` handlers run, however often the connection breaks. A message that comes back after
a break meets its running handler, or that handler's verdict: it never runs twice at once, and the break
consumes no attempt. Copies (retry, quarantine) travel on a connection of their own, because RabbitMQ stops reading
from one that publishes during a memory or disk alarm; meanwhile events that need no copy go on.

When it does NOT hold: the message may come back to another member, which runs it again and counts the break as a
delivery: RabbitMQ does not tell a lost connection from a dead process. Inbox.
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError

from ..core.event import Handler
from ..core.job import Decision, RetryPolicy
from .delivery import Lanes, judge, log, pauses, set_within

__all__ = ["TROUBLE", "RabbitConsumer", "closed", "number"]

TROUBLE = (AMQPError, ChannelInvalidStateError, OSError, RuntimeError, TimeoutError)
LOOK = 0.5  # seconds; how long a consumer needs to notice `stop` or a lost connection
REMEMBER = 600.0  # seconds a verdict waits for its message to come back
MAX_HELD = 2_000  # messages that wait for their copy to be taken, before reading pauses


@dataclass(eq=False)
class _Job:
    """One event in hand. `message`: what to answer; None from the loss of its connection until it comes back."""

    message: AbstractIncomingMessage | None
    lost: int = 0  # deliveries that ended with our connection
    back: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class RabbitConsumer:
    group: str
    connect: Callable[[], Awaitable[AbstractConnection]]
    declare: Callable[[AbstractChannel], Awaitable[AbstractQueue]]
    retry: Callable[[AbstractIncomingMessage, float, int], Awaitable[None]]
    park: Callable[[AbstractIncomingMessage, str, int], Awaitable[None]]
    handler: Handler
    stop: asyncio.Event
    concurrency: int
    policy: RetryPolicy
    time_limit: float
    answer_within: float
    _jobs: dict[bytes, list[_Job]] = field(default_factory=dict)  # a second publish of an event makes two
    _lanes: Lanes = field(default_factory=Lanes)
    _stuck: int = 0  # jobs whose copy is on its way

    async def run(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)
        async for _ in pauses(self.stop):
            try:
                await self._session()
            except TROUBLE as error:
                log.warning("group %s cannot read from RabbitMQ, trying again: %r", self.group, error)
        await self._drain()

    # reading

    async def _session(self) -> None:
        # A plain connection, rebuilt whole: what an automatic reconnect restores is hard to reason about.
        connection = await self.connect()
        try:
            # Bounded: right after a restart a quorum queue may not answer, and aiormq would wait forever.
            async with asyncio.timeout(self.answer_within):
                channel = await connection.channel()
                await channel.set_qos(prefetch_count=self.concurrency)
                queue = await self.declare(channel)
                tag = await queue.consume(self._receive)
                underlay: Any = await channel.get_underlay_channel()
            granted = 0
            # Without its tag the broker has removed the consumer from the queue.
            while not channel.is_closed and tag in underlay.consumers:
                if self.stop.is_set():
                    await queue.cancel(tag, timeout=self.answer_within)
                    await self._drain()
                    return
                granted = min(granted, self._stuck)
                if 2 * (self._stuck - granted) >= self.concurrency and self._stuck < MAX_HELD:
                    # What cannot be copied fills the prefetch. A new consumer has its own.
                    granted = self._stuck
                    async with asyncio.timeout(self.answer_within):
                        await queue.cancel(tag)
                        tag = await queue.consume(self._receive)
                await set_within(self.stop, LOOK)
        finally:
            for job in itertools.chain(*self._jobs.values()):
                if job.message is not None:
                    job.message, job.lost = None, job.lost + 1
                    job.back.clear()
            await closed(connection)

    async def _receive(self, message: AbstractIncomingMessage) -> None:
        key = hashlib.sha256(b"%d " % number(message, "spent") + message.body).digest()
        jobs = self._jobs.setdefault(key, [])
        if message.redelivered and (known := next((job for job in jobs if job.message is None), None)):
            known.message = message
            known.back.set()
            return
        job = _Job(message)
        jobs.append(job)
        self._lanes.start(None, lambda: self._work(key, job))

    async def _drain(self) -> None:
        for job in itertools.chain(*self._jobs.values()):
            job.back.set()  # what has not come back by now goes to another member
        patience = self.answer_within
        while tasks := set(self._lanes.tasks):
            ended, _ = await asyncio.wait(tasks, timeout=LOOK)
            if not ended and self._stuck >= len(tasks):
                patience -= LOOK
            if patience < 0:  # an alarm: nothing can be copied, so the messages go back unanswered
                await self._lanes.abort()

    # running

    async def _work(self, key: bytes, job: _Job) -> None:
        try:
            verdict, deliveries = await self._judged(job)
            while deliveries and (message := await self._message_of(job)) is not None:
                try:
                    if verdict is not None:
                        await self._copy(message, verdict, deliveries)
                        verdict = None  # the copy is there: only the acknowledgement is missing
                    await message.ack()
                    return
                except TROUBLE as error:
                    log.warning("RabbitMQ did not take an answer, trying again: %r", error)
                    await set_within(self.stop, LOOK)
                except Exception:
                    # Never left unanswered: it would hold a place in the prefetch forever.
                    log.exception("an event could not be settled: RabbitMQ moves it to the quarantine")
                    with contextlib.suppress(*TROUBLE):
                        await message.reject(requeue=False)
                    return
        finally:
            self._jobs[key].remove(job)
            if not self._jobs[key]:
                del self._jobs[key]

    async def _judged(self, job: _Job) -> tuple[Decision | None, int]:
        """The verdict and which delivery it was; 0: not run, the message is somebody else's now."""
        while await self._message_of(job) is not None:
            async with self._slots:
                if (message := job.message) is None:  # lost while it waited for its turn
                    continue
                spent = number(message, "spent")
                deliveries = spent + 1 + max(0, number(message, "x-delivery-count") - job.lost)
                verdict = await judge(self.handler, message.body, deliveries, self.policy, self.time_limit)
                return verdict, deliveries
        return None, 0

    async def _message_of(self, job: _Job) -> AbstractIncomingMessage | None:
        if job.message is None and not self.stop.is_set():
            await set_within(job.back, REMEMBER)
        return job.message

    async def _copy(self, message: AbstractIncomingMessage, verdict: Decision, deliveries: int) -> None:
        self._stuck += 1
        try:
            if verdict.delay is None:
                await self.park(message, verdict.reason, deliveries)
                log.warning("quarantined an event for %s: %s", self.group, verdict.reason)
            else:
                spent = deliveries if verdict.consume_attempt else deliveries - 1
                await self.retry(message, verdict.delay, spent)
        finally:
            self._stuck -= 1


def number(message: AbstractIncomingMessage, name: str) -> int:
    value = message.headers.get(name)
    return value if isinstance(value, int) else 0


async def closed(thing: AbstractChannel | AbstractConnection) -> None:
    """Closing a broken connection may hang or fail, and neither matters."""
    with contextlib.suppress(*TROUBLE):
        async with asyncio.timeout(2):
            await thing.close()

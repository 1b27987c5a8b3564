"""Event bus on RabbitMQ: a quorum queue per group, publisher confirms, delayed retry, dead letters.

Promise, beyond `event_bus`: accepted means confirmed by the broker and routed to at least one group (an event
nobody would get is refused, not swallowed). A failed event waits in the queue for its delay and comes back; one
that kills its consumers is dead-lettered by the broker itself after `delivery_limit` crashes. During a memory or disk
alarm publishing is refused at once, and consuming goes on.

When it does NOT hold
- A group gets nothing from before its `subscribe`: queues have no past. Subscribe first, or replay from the outbox.
- No order once there is more than one consumer or one failure, and no dropping of a second publish: inbox.
- A retry is "publish to the retry queue, then acknowledge": a crash between the two makes a copy, never a loss.
- A broken connection is not a crash to the member that had it, but it is to the others: see `rabbit_consumer`.
- Events that fail during an alarm wait in their consumer until it is over: nothing can be copied meanwhile.
- `lag` does not see what consumers hold unacknowledged; `quarantined` borrows the messages it shows for a moment.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity, PublishError

from ..core.event import BrokerUnavailable, Event, Handler, topic_of
from ..core.failures import Transient
from ..core.job import RetryPolicy
from .bus import EVENTS, Capabilities, Quarantined
from .delivery import checked_name, encoded, text, wire_id
from .rabbit_consumer import TROUBLE, RabbitConsumer, closed, number

__all__ = ["NoSubscriber", "RabbitBus"]

# A queue per delay, because a per-message TTL only expires at the head: a 1 s retry would wait behind a 60 s one.
DELAYS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200)
SAFE: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-overflow": "reject-publish",
    "x-dead-letter-strategy": "at-least-once",
}
WHY = {"delivery_limit": "its consumers died", "maxlen": "a length limit with drop-head pushed it out"}
# Seconds. aiormq takes a connection for dead after three times this and a bit: 208 s with its default of 60.
HEARTBEAT = 4


class NoSubscriber(Transient):
    """No group is subscribed to this topic, so RabbitMQ would drop the event. Subscribe one, publish again."""


class RabbitBus:
    def __init__(
        self, url: str, *, prefix: str = "events", confirm_within: float = 10.0, delivery_limit: int = 20
    ) -> None:
        self.url, self.prefix = url, prefix
        self.confirm_within, self.delivery_limit = confirm_within, delivery_limit
        self._known: set[str] = set()  # retry queues that are declared
        # During an alarm RabbitMQ stops reading from a connection that publishes: questions and consumers have others.
        self._events, self._copies, self._questions = (_Link(self._connect, confirm_within) for _ in range(3))
        self.capabilities = Capabilities(
            broker="rabbitmq",
            replay_from_start=False,
            limits=(
                "a group gets only what is published after it subscribed",
                "no order per key, no dropping of a second publish under the same id",
                f"a delivery limit of {delivery_limit} crashes, whatever the policy says above it",
                "lag counts waiting events, not the ones consumers hold",
                "what somebody purges is gone without a word: the server keeps no trace of it",
                "a policy with a length limit drops the oldest in the quarantine unless it says reject-publish",
                "RabbitMQ 3.10 on one node: a queue declared within a second of a SIGKILL does not come back",
            ),
        )

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        try:
            channel = await self._events.channel()
            # If sent anyway, every attempt would land when the alarm is over.
            if await self._events.blocked():
                return [self._unconfirmed("it is short of memory or disk and takes nothing")] * len(events)
            async with asyncio.timeout(self.confirm_within):
                exchange = await self._exchange(channel)
        except TROUBLE as error:
            await self._events.drop()
            return [self._unconfirmed(error)] * len(events)
        results = list(await asyncio.gather(*(self._send(exchange, event) for event in events)))
        if any(isinstance(each, BrokerUnavailable) for each in results) and not await self._events.blocked():
            await self._events.drop()  # the next publish starts from a fresh connection
        return results

    async def subscribe(self, group: str, topics: Sequence[str]) -> None:
        async with self._questions.fresh() as channel:
            await self._declare(channel, group, topics)

    async def consume(
        self,
        group: str,
        topics: Sequence[str],
        handler: Handler,
        *,
        stop: asyncio.Event,
        concurrency: int = 16,
        policy: RetryPolicy = EVENTS,
        time_limit: float = 60.0,
    ) -> None:
        async def retry(message: AbstractIncomingMessage, delay: float, spent: int) -> None:
            headers = {"topic": _topic(message), "spent": spent}
            queue = await self._retry_queue(group, delay)
            await self._copy(message.body, queue, message.message_id or "", headers)

        async def park(message: AbstractIncomingMessage, reason: str, deliveries: int) -> None:
            headers = {"topic": _topic(message), "reason": reason, "deliveries": deliveries}
            await self._copy(message.body, f"{self._queue(group)}.quarantine", str(uuid4()), headers)

        consumer = RabbitConsumer(
            group,
            connect=self._connect,
            declare=lambda channel: self._declare(channel, group, topics),
            retry=retry,
            park=park,
            handler=handler,
            stop=stop,
            concurrency=concurrency,
            policy=policy,
            time_limit=time_limit,
            answer_within=self.confirm_within,
        )
        await consumer.run()

    async def quarantined(self, group: str, limit: int = 100) -> list[Quarantined]:
        async with self._questions.fresh() as channel:  # closing it releases every message
            entries = [_shown(message) async for message in self._parked(channel, group, limit)]
        return sorted(entries, key=lambda each: each.at)

    async def replay_quarantined(self, group: str, ids: Sequence[str]) -> int:
        done, wanted = 0, set(ids)
        async with self._questions.fresh() as channel:
            async for message in self._parked(channel, group, 100_000):
                if message.message_id in wanted:
                    # Into the group's own queue: through the exchange every other group would get it too.
                    headers = {"topic": _topic(message)}
                    await self._copy(message.body, self._queue(group), str(uuid4()), headers)
                    await message.ack()
                    done += 1
        return done

    async def lag(self, group: str) -> int:
        names = [self._queue(group), *(self._retry_name(group, delay) for delay in DELAYS)]
        total = 0
        for name in names:
            with contextlib.suppress(ChannelNotFoundEntity):  # no event ever waited that long
                async with self._questions.fresh() as channel:
                    queue = await channel.declare_queue(name, passive=True)
                    total += queue.declaration_result.message_count or 0
        return total

    async def close(self) -> None:
        for link in (self._events, self._copies, self._questions):
            await link.drop()

    # topology

    async def _declare(self, channel: AbstractChannel, group: str, topics: Sequence[str]) -> Any:
        name = self._queue(checked_name(group))
        parked = f"{name}.quarantine"
        # A reader's "get and put back" counts as a delivery: the default limit of RabbitMQ 4 would drop the
        # message after 20 looks.
        await channel.declare_queue(
            parked, durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 1_000_000}
        )
        queue = await channel.declare_queue(
            name,
            durable=True,
            arguments={
                **SAFE,
                "x-delivery-limit": self.delivery_limit,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": parked,
            },
        )
        exchange = await self._exchange(channel)
        for topic in topics:
            await queue.bind(exchange, routing_key=checked_name(topic))
        return queue

    async def _exchange(self, channel: AbstractChannel) -> AbstractExchange:
        return await channel.declare_exchange(self.prefix, aio_pika.ExchangeType.DIRECT, durable=True)

    async def _retry_queue(self, group: str, delay: float) -> str:
        step = next((each for each in DELAYS if each >= delay), DELAYS[-1])
        arguments = {
            **SAFE,
            "x-message-ttl": int(step * 1000),
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self._queue(group),
        }
        name = self._retry_name(group, step)
        if name not in self._known:
            async with asyncio.timeout(self.confirm_within), self._questions.fresh() as channel:
                await channel.declare_queue(name, durable=True, arguments=arguments)
            self._known.add(name)
        return name

    def _queue(self, group: str) -> str:
        return f"{self.prefix}.{group}"

    def _retry_name(self, group: str, delay: float) -> str:
        return f"{self._queue(group)}.retry.{int(delay * 1000)}ms"

    # messages

    async def _send(self, exchange: AbstractExchange, event: Event) -> Exception | None:
        body = encoded(event)
        if isinstance(body, Exception):
            return body
        topic = topic_of(event)
        message = _message(body, wire_id(event), {"topic": topic})
        try:
            await exchange.publish(message, topic, mandatory=True, timeout=self.confirm_within)
        except PublishError:
            return NoSubscriber(f"no group is subscribed to {topic!r}: subscribe one, then publish {event.id} again")
        except TROUBLE as error:
            return self._unconfirmed(error)
        return None

    async def _copy(self, body: bytes, queue: str, message_id: str, headers: dict[str, Any]) -> None:
        """Confirmed before the original is acknowledged, however long an alarm lasts."""
        channel = await self._copies.channel()
        message = _message(body, message_id, headers)
        sending = asyncio.ensure_future(channel.default_exchange.publish(message, queue, mandatory=True))
        try:
            while not (await asyncio.wait({sending}, timeout=self.confirm_within))[0]:
                if not await self._copies.blocked():
                    await self._copies.drop()
                    raise TimeoutError(f"no confirmation within {self.confirm_within} s")
            sending.result()
        except PublishError:  # the queue is gone: declare it again
            self._known.discard(queue)
            raise
        finally:
            sending.cancel()

    async def _parked(self, channel: AbstractChannel, group: str, limit: int) -> AsyncIterator[AbstractIncomingMessage]:
        queue = await channel.get_queue(f"{self._queue(group)}.quarantine", ensure=False)
        for _ in range(limit):
            if (message := await queue.get(fail=False)) is None:
                return
            yield message

    async def _connect(self) -> AbstractConnection:
        beat: dict[str, Any] = {} if "heartbeat=" in self.url else {"heartbeat": HEARTBEAT}
        connection: AbstractConnection = await aio_pika.connect(self.url, timeout=self.confirm_within, **beat)
        return connection

    def _unconfirmed(self, error: object) -> BrokerUnavailable:
        return BrokerUnavailable(f"RabbitMQ did not confirm ({error!r}); publish the same id again")


class _Link:
    """One connection, built when needed and rebuilt when broken."""

    def __init__(self, connect: Callable[[], Awaitable[AbstractConnection]], within: float) -> None:
        self._connect, self._within = connect, within
        self._connection: AbstractConnection | None = None
        self._shared: AbstractChannel | None = None
        self._lock = asyncio.Lock()

    async def channel(self) -> AbstractChannel:
        """The one that publishers share."""
        async with self._lock, asyncio.timeout(self._within):
            if self._shared is None or self._shared.is_closed:
                self._shared = await self._open()
            return self._shared

    @contextlib.asynccontextmanager
    async def fresh(self) -> AsyncIterator[AbstractChannel]:
        async with self._lock, asyncio.timeout(self._within):
            channel = await self._open()
        try:
            yield channel
        finally:
            await closed(channel)

    async def blocked(self) -> bool:
        """Has RabbitMQ said that it takes nothing from this connection (memory or disk alarm)?"""
        transport = self._connection.transport if self._connection is not None else None
        if transport is None:
            return False
        try:
            async with asyncio.timeout(0.01):
                await transport.connection.ready()
        except TimeoutError:
            return True
        return False

    async def drop(self) -> None:
        connection, self._connection, self._shared = self._connection, None, None
        if connection is not None:
            await closed(connection)

    async def _open(self) -> AbstractChannel:
        if self._connection is not None:
            with contextlib.suppress(*TROUBLE):
                return await self._connection.channel(on_return_raises=True)
        await self.drop()  # broken since its last use
        self._connection = await self._connect()
        return await self._connection.channel(on_return_raises=True)


def _message(body: bytes, message_id: str, headers: dict[str, Any]) -> aio_pika.Message:
    return aio_pika.Message(
        body,
        message_id=message_id,
        headers=headers,
        content_type="application/cloudevents+json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        timestamp=datetime.now(UTC),
    )


def _topic(message: AbstractIncomingMessage) -> str:
    return str(message.headers.get("topic") or message.routing_key or "")


def _shown(message: AbstractIncomingMessage) -> Quarantined:
    deaths = message.headers.get("x-death")
    died: Any = deaths[0].get("reason") if isinstance(deaths, list) and isinstance(deaths[0], dict) else None
    why = WHY.get(died, "its consumer could not settle it")
    reason = str(message.headers.get("reason") or f"dead-lettered by RabbitMQ ({died!r}): {why}")
    at = message.timestamp or datetime.now(UTC)
    deliveries = number(message, "deliveries")
    return Quarantined(message.message_id or "", _topic(message), text(message.body), reason, deliveries, at)

"""Event bus on RabbitMQ: a quorum queue per group, publisher confirms, delayed retry, dead letters.

Promise, beyond `event_bus`: accepted means confirmed by the broker and routed to at least one group (an event
nobody would get is refused, not swallowed). A failed event waits in a queue of its own delay and comes back; one
that kills its consumers is dead-lettered by the broker itself after `delivery_limit` crashes.

When it does NOT hold
- A group gets nothing from before its `subscribe`: queues have no past. Subscribe first, or replay from the outbox.
- No order once there is more than one consumer or one failure, and no dropping of a second publish: inbox.
- A retry is "publish to the retry queue, then acknowledge": a crash between the two makes a copy, never a loss.
- `lag` does not see what consumers hold unacknowledged; `quarantined` borrows the messages it shows for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractIncomingMessage
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError, ChannelNotFoundEntity, PublishError

from .bus_delivery import Lanes, checked_name, encoded, judge, log, pauses, text
from .errors import Transient
from .event_bus import EVENTS, BrokerUnavailable, Capabilities, Handler, Quarantined, topic_of
from .event_schema import Event
from .retry import RetryPolicy

__all__ = ["NoSubscriber", "RabbitBus"]

# A queue per delay, because a per-message TTL only expires at the head: a 1 s retry would wait behind a 60 s one.
DELAYS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200)
SAFE: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-overflow": "reject-publish",
    "x-dead-letter-strategy": "at-least-once",
}
TROUBLE = (AMQPError, ChannelInvalidStateError, OSError, RuntimeError, TimeoutError)


class NoSubscriber(Transient):
    """No group is subscribed to this topic, so RabbitMQ would drop the event. Subscribe one, publish again."""


class RabbitBus:
    def __init__(
        self, url: str, *, prefix: str = "events", confirm_within: float = 10.0, delivery_limit: int = 20
    ) -> None:
        self.url, self.prefix = url, prefix
        self.confirm_within, self.delivery_limit = confirm_within, delivery_limit
        self._connection: AbstractConnection | None = None
        self._connecting = asyncio.Lock()
        self._out: tuple[AbstractChannel, AbstractExchange] | None = None  # where events are published
        self.capabilities = Capabilities(
            broker="rabbitmq",
            replay_from_start=False,
            limits=(
                "a group gets only what is published after it subscribed",
                "no order per key, no dropping of a second publish under the same id",
                f"a delivery limit of {delivery_limit} crashes, whatever the policy says above it",
                "lag counts waiting events, not the ones consumers hold",
                "RabbitMQ 3.10 on one node: a queue declared within a second of a SIGKILL does not come back",
            ),
        )

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        try:
            exchange = await self._outlet()
        except TROUBLE as error:
            await self._disconnect()
            return [self._unconfirmed(error)] * len(events)
        results = list(await asyncio.gather(*(self._send(exchange, event) for event in events)))
        if any(isinstance(result, BrokerUnavailable) for result in results):
            await self._disconnect()  # the next publish starts from a fresh connection
        return results

    async def subscribe(self, group: str, topics: Sequence[str]) -> None:
        async with self._channel() as channel:
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
        lanes = Lanes()

        async def work(channel: AbstractChannel, message: AbstractIncomingMessage) -> None:
            deliveries = _number(message, "spent") + _number(message, "x-delivery-count") + 1
            verdict = await judge(handler, message.body, deliveries, policy, time_limit)
            with contextlib.suppress(*TROUBLE):  # unacknowledged when the channel is gone: it comes back
                if verdict is None:
                    pass
                elif verdict.delay is None:
                    await self._park(channel, group, message, verdict.reason, deliveries)
                    log.warning("quarantined an event for %s: %s", group, verdict.reason)
                else:
                    spent = deliveries if verdict.consume_attempt else deliveries - 1
                    headers = {"topic": _topic(message), "spent": spent}
                    queue = await self._retry_queue(channel, group, verdict.delay)
                    await self._copy(channel, message.body, queue, message.message_id or "", headers)
                await message.ack()

        async def receive(channel: AbstractChannel, message: AbstractIncomingMessage) -> None:
            lanes.start(None, lambda: work(channel, message))

        async for _ in pauses(stop):
            try:
                # A plain connection, rebuilt whole: what an automatic reconnect restores is hard to reason about.
                connection = await aio_pika.connect(self.url, timeout=self.confirm_within)
                try:
                    # Bounded: right after a restart a quorum queue may not answer, and aiormq would wait for ever.
                    async with asyncio.timeout(self.confirm_within):
                        channel = await connection.channel(on_return_raises=True)
                        await channel.set_qos(prefetch_count=concurrency)
                        queue = await self._declare(channel, group, topics)
                        tag = await queue.consume(partial(receive, channel))
                    if await _stopped(stop, channel, tag):
                        await queue.cancel(tag, timeout=self.confirm_within)
                        await lanes.drain()
                finally:
                    await _closed(connection)
            except TROUBLE as error:
                log.warning("group %s cannot read from RabbitMQ, trying again: %r", group, error)
        await lanes.drain()

    async def quarantined(self, group: str, limit: int = 100) -> list[Quarantined]:
        async with self._channel() as channel:  # closing it gives every message back
            found = [_shown(message) async for message in self._parked(channel, group, limit)]
        return sorted(found, key=lambda each: each.at)

    async def replay_quarantined(self, group: str, ids: Sequence[str]) -> int:
        done, wanted = 0, set(ids)
        async with self._channel() as channel:
            async for message in self._parked(channel, group, 100_000):
                if message.message_id in wanted:
                    # Into the group's own queue: through the exchange every other group would get it too.
                    headers = {"topic": _topic(message)}
                    await self._copy(channel, message.body, self._queue(group), str(uuid4()), headers)
                    await message.ack()
                    done += 1
        return done

    async def lag(self, group: str) -> int:
        names = [self._queue(group), *(self._retry_name(group, delay) for delay in DELAYS)]
        total = 0
        for name in names:
            with contextlib.suppress(ChannelNotFoundEntity):  # no event ever waited that long
                async with self._channel() as channel:
                    queue = await channel.declare_queue(name, passive=True)
                    total += queue.declaration_result.message_count or 0
        return total

    async def close(self) -> None:
        await self._disconnect()

    # topology

    async def _declare(self, channel: AbstractChannel, group: str, topics: Sequence[str]) -> Any:
        name = self._queue(checked_name(group))
        parked = f"{name}.quarantine"
        # A reader's "get and put back" counts as a delivery: the default limit of RabbitMQ 4 would drop the
        # message after 20 looks at it.
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

    async def _retry_queue(self, channel: AbstractChannel, group: str, delay: float) -> str:
        step = next((each for each in DELAYS if each >= delay), DELAYS[-1])
        arguments = {
            **SAFE,
            "x-message-ttl": int(step * 1000),
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self._queue(group),
        }
        name = self._retry_name(group, step)
        await channel.declare_queue(name, durable=True, arguments=arguments)
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
        message = _message(body, event.id, {"topic": topic})
        try:
            await exchange.publish(message, topic, mandatory=True, timeout=self.confirm_within)
        except PublishError:
            return NoSubscriber(
                f"no group is subscribed to {topic!r}: subscribe one, then publish {event.id} again"
            )
        except TROUBLE as error:
            return self._unconfirmed(error)
        return None

    async def _copy(
        self, channel: AbstractChannel, body: bytes, queue: str, message_id: str, headers: dict[str, Any]
    ) -> None:
        """Confirmed before the original is acknowledged."""
        message = _message(body, message_id, headers)
        await channel.default_exchange.publish(message, queue, mandatory=True, timeout=self.confirm_within)

    async def _park(
        self,
        channel: AbstractChannel,
        group: str,
        message: AbstractIncomingMessage,
        reason: str,
        deliveries: int,
    ) -> None:
        headers = {"topic": _topic(message), "reason": reason, "deliveries": deliveries}
        await self._copy(channel, message.body, f"{self._queue(group)}.quarantine", str(uuid4()), headers)

    async def _parked(
        self, channel: AbstractChannel, group: str, limit: int
    ) -> AsyncIterator[AbstractIncomingMessage]:
        queue = await channel.get_queue(f"{self._queue(group)}.quarantine", ensure=False)
        for _ in range(limit):
            if (message := await queue.get(fail=False)) is None:
                return
            yield message

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[AbstractChannel]:
        async with self._connecting, asyncio.timeout(self.confirm_within):
            channel = await self._open_channel()
        try:
            yield channel
        finally:
            await _closed(channel)

    async def _outlet(self) -> AbstractExchange:
        async with self._connecting, asyncio.timeout(self.confirm_within):
            if self._out is None or self._out[0].is_closed:
                channel = await self._open_channel()
                self._out = channel, await self._exchange(channel)
            return self._out[1]

    async def _open_channel(self) -> AbstractChannel:
        if self._connection is not None:
            with contextlib.suppress(*TROUBLE):
                return await self._connection.channel(on_return_raises=True)
        await self._disconnect()  # broken since its last use
        self._connection = await aio_pika.connect(self.url, timeout=self.confirm_within)
        return await self._connection.channel(on_return_raises=True)

    async def _disconnect(self) -> None:
        connection, self._connection, self._out = self._connection, None, None
        if connection is not None:
            await _closed(connection)

    def _unconfirmed(self, error: BaseException) -> BrokerUnavailable:
        return BrokerUnavailable(f"RabbitMQ did not confirm ({error!r}); publish the same id again")


def _message(body: bytes, message_id: str, headers: dict[str, Any]) -> aio_pika.Message:
    return aio_pika.Message(
        body,
        message_id=message_id,
        headers=headers,
        content_type="application/cloudevents+json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        timestamp=datetime.now(UTC),
    )


def _number(message: AbstractIncomingMessage, name: str) -> int:
    value = message.headers.get(name)
    return value if isinstance(value, int) else 0


def _topic(message: AbstractIncomingMessage) -> str:
    return str(message.headers.get("topic") or message.routing_key or "")


def _shown(message: AbstractIncomingMessage) -> Quarantined:
    deaths = message.headers.get("x-death")
    died: Any = deaths[0].get("reason") if isinstance(deaths, list) and isinstance(deaths[0], dict) else None
    reason = str(message.headers.get("reason") or f"dead-lettered by RabbitMQ ({died!r}): its consumers died")
    at = message.timestamp or datetime.now(UTC)
    deliveries = _number(message, "deliveries")
    return Quarantined(message.message_id or "", _topic(message), text(message.body), reason, deliveries, at)


async def _stopped(stop: asyncio.Event, channel: AbstractChannel, tag: str) -> bool:
    """True when asked to stop, False when the channel is gone or the broker took the consumer off its queue."""
    underlay: Any = await channel.get_underlay_channel()
    while not stop.is_set() and not channel.is_closed and tag in underlay.consumers:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)
    return stop.is_set() and not channel.is_closed


async def _closed(thing: AbstractChannel | AbstractConnection) -> None:
    """Closing a broken connection may hang or fail, and neither matters."""
    with contextlib.suppress(*TROUBLE):
        async with asyncio.timeout(2):
            await thing.close()

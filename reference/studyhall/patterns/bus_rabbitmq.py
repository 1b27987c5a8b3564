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
        self.capabilities = Capabilities(
            broker="rabbitmq",
            replay_from_start=False,
            limits=(
                "a group gets only what is published after it subscribed",
                "no order per key, no dropping of a second publish under the same id",
                f"a delivery limit of {delivery_limit} crashes, whatever the policy says above it",
                "lag counts waiting events, not the ones consumers hold",
            ),
        )

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        try:
            async with self._channel() as channel:
                exchange = await self._exchange(channel)
                sends = (self._send(exchange, event) for event in events)
                return list(await asyncio.gather(*sends))
        except TROUBLE as error:
            return [self._unconfirmed(error)] * len(events)

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
            spent = _number(message, "spent")
            deliveries = spent + _number(message, "x-delivery-count") + 1
            verdict = await judge(handler, message.body, deliveries, policy, time_limit)
            with contextlib.suppress(*TROUBLE):  # unacknowledged when the channel is gone: it comes back
                if verdict is None:
                    pass
                elif verdict.delay is None:
                    await self._park(channel, group, message, verdict.reason, deliveries)
                    log.warning("quarantined an event for %s: %s", group, verdict.reason)
                else:
                    headers = {
                        "topic": _topic(message),
                        "spent": deliveries if verdict.spend_attempt else spent,
                    }
                    queue = await self._retry_queue(channel, group, verdict.delay)
                    await self._copy(channel, message.body, queue, message.message_id or "", headers)
                await message.ack()

        async for _ in pauses(stop):
            try:
                # Plain connections, rebuilt whole: what an automatic reconnect restores is harder to reason about.
                async with await aio_pika.connect(self.url, timeout=10) as connection:
                    channel = await connection.channel(on_return_raises=True)
                    await channel.set_qos(prefetch_count=concurrency)
                    queue = await self._declare(channel, group, topics)

                    async def receive(
                        message: AbstractIncomingMessage, channel: AbstractChannel = channel
                    ) -> None:
                        lanes.start(None, lambda: work(channel, message))

                    tag = await queue.consume(receive)
                    if await _stopped(stop, channel):
                        await queue.cancel(tag)
                        await lanes.drain()
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
        if self._connection is not None:
            await self._connection.close()

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
        async with self._connecting:
            if self._connection is None or self._connection.is_closed:
                self._connection = await aio_pika.connect(self.url, timeout=self.confirm_within)
        async with self._connection.channel(on_return_raises=True) as channel:
            yield channel

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


async def _stopped(stop: asyncio.Event, channel: AbstractChannel) -> bool:
    """True when asked to stop, False when the channel is gone."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait(
            [stopping, asyncio.ensure_future(channel.closed())], return_when=asyncio.FIRST_COMPLETED
        )
        return stop.is_set()
    finally:
        stopping.cancel()

"""Every event-bus adapter under one name each, and what their suites have in common."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from studyhall.patterns.core.event import Event
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.event_bus import EventBus

from .tcp_proxy import TcpProxy

QUICK = RetryPolicy(base=0.05, cap=0.1, attempts=3)

# Dead members are replaced after about a second, not half a minute: tests wait for it.
TAKEOVER = 1.5


def _redis(url: str, prefix: str, **options: Any) -> EventBus:
    from studyhall.patterns.core.connections import producer_client
    from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus

    return RedisStreamsBus(producer_client(url), prefix=prefix, claim_idle=TAKEOVER, **options)


def _rabbitmq(url: str, prefix: str) -> EventBus:
    from studyhall.patterns.event_bus.rabbitmq import RabbitBus

    return RabbitBus(url, prefix=prefix)


def _nats(url: str, prefix: str, **options: Any) -> EventBus:
    from studyhall.patterns.event_bus.nats import NatsBus

    return NatsBus(url, prefix=prefix, ack_wait=TAKEOVER, **options)


def _kafka(url: str, prefix: str, **options: Any) -> EventBus:
    from studyhall.patterns.event_bus.kafka import KafkaBus

    # The mock brokers create topics when asked about them and know no CreateTopics.
    address = url.removeprefix("mock:")
    return KafkaBus(address, prefix=prefix, create_topics=address == url, session_timeout=3.0, **options)


# Each imports its own client only: a process that is killed in a test should be back soon.
BUSES: dict[str, Callable[[str, str], EventBus]] = {
    "redis": _redis,
    "redis-ordered": lambda url, prefix: _redis(url, prefix, ordered=True, partitions=4),
    "rabbitmq": _rabbitmq,
    "nats": _nats,
    "nats-ordered": lambda url, prefix: _nats(url, prefix, ordered=True, partitions=4),
    "kafka": _kafka,
    "kafka-ordered": lambda url, prefix: _kafka(url, prefix, ordered=True),
}
# Kafka once more, on a cluster.
THREE_KAFKA = "three-kafka"
SERVERS = {
    **{"redis": "redis_url", "rabbitmq": "rabbitmq_url", "nats": "nats_url", "kafka": "kafka_url"},
    THREE_KAFKA: "three_kafka_url",
}


def through(proxy: TcpProxy, url: str) -> str:
    """The same server, reached through the proxy."""
    return url.replace(f":{proxy.target}", f":{proxy.port}")


def open_bus(kind: str, url: str, prefix: str | None = None) -> EventBus:
    return BUSES[kind.removeprefix("three-")](url, prefix or new_prefix())


def new_prefix() -> str:
    return f"t{uuid.uuid4().hex[:10]}"


async def close_bus(bus: EventBus) -> None:
    await asyncio.wait_for(bus.close(), 30)
    if (client := getattr(bus, "redis", None)) is not None:
        await client.aclose()


def events(count: int, subject: str | None = None, **data: Any) -> list[Event]:
    return [
        Event(source="/test", type="order.placed.v1", subject=subject or f"order-{n}", data={"number": n, **data})
        for n in range(count)
    ]


@asynccontextmanager
async def consuming(
    bus: EventBus, group: str, handler: Callable[[Event], Awaitable[None]], **options: Any
) -> AsyncIterator[asyncio.Event]:
    """One member, until the yielded event is set or the block ends."""
    stop = asyncio.Event()
    options = {"policy": QUICK, **options}
    task = asyncio.create_task(bus.consume(group, ["order"], handler, stop=stop, **options))
    try:
        yield stop
        assert stop.is_set() or not task.done(), "a consumer outlives whatever happens to its broker"
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)

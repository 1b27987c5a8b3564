"""The event bus that the settings name: our Redis by default, or RabbitMQ, NATS or Kafka."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from .patterns.core.connections import producer_client
from .patterns.event_bus import EventBus
from .settings import SettingsError


@asynccontextmanager
async def open_bus(url: str) -> AsyncIterator[EventBus]:
    """`redis://…`, `amqp://…`, `nats://…` or `kafka://host:port`; order per key is on wherever the broker has it."""
    bus = _bus(url)
    try:
        yield bus
    finally:
        await bus.close()


def _bus(url: str) -> EventBus:
    parts = urlsplit(url)
    try:
        match parts.scheme:
            case "redis" | "rediss" | "unix" | "redis+sentinel" | "rediss+sentinel":
                from .patterns.event_bus.redis_streams import RedisStreamsBus

                return RedisStreamsBus(producer_client(url), ordered=True, partitions=4)
            case "amqp" | "amqps":
                from .patterns.event_bus.rabbitmq import RabbitBus

                return RabbitBus(url)
            case "nats" | "tls":
                from .patterns.event_bus.nats import NatsBus

                return NatsBus(url, ordered=True)
            case "kafka":
                from .patterns.event_bus.kafka import KafkaBus

                return KafkaBus(parts.netloc, ordered=True)
    except ModuleNotFoundError as missing:
        raise SettingsError(f"the bus {parts.scheme} needs {missing.name}: pip install 'queuesmith[brokers]'") from None
    raise SettingsError(f"STUDYHALL_BUS_URL: {parts.scheme}:// is not one of redis, amqp, nats, kafka")

"""Inbox: a consumer records (event id, its own name) in the transaction of its effect.

Promise: however often an event is delivered, to this consumer's process or to another one, its effect is
committed once. Two consumers of one event have a marker each and know nothing of one another. An event that
cannot be read is never an effect: the error is permanent and carries the reason for the quarantine.

When it does NOT hold: see `idempotency`, whose markers these are. An effect outside the database (an
e-mail) needs the receiver's idempotency key; make it from the event's id.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .core.event import Event, Handler
from .idempotency import Inbox, fingerprint

__all__ = ["Effect", "consumer", "handle_once"]

Effect = Callable[[AsyncConnection, Event], Awaitable[Any]]


class Reads(Protocol):
    """What is needed of `event_schema.EventTypes`."""

    def read(self, event: Event) -> object: ...


async def handle_once(store: AsyncEngine, consumer: str, event: Event, effect: Effect) -> Any:
    """Run `effect(tx, event)` unless this consumer had the event before; returns the first run's result."""
    return await Inbox(store, consumer).once(event.id, fingerprint(event.fact), lambda tx: effect(tx, event))


def consumer(store: AsyncEngine, name: str, types: Reads, effect: Effect) -> Handler:
    """A handler for `EventBus.consume`: checks the event against the registry, then applies it once."""

    async def handle(event: Event) -> None:
        types.read(event)  # raises InvalidEvent: the bus quarantines it instead of retrying
        await handle_once(store, name, event, effect)

    return handle

"""Inbox: a consumer records (event id, its own name) in the transaction of its effect.

Promise: however often an event is delivered, to this consumer's process or to another one, its effect is
committed once. Two consumers of one event have a marker each and know nothing of one another. An event that
cannot be read is never an effect: the error is permanent and carries the reason for the quarantine.

When it does NOT hold: see `idempotency`, whose markers these are. An effect outside the database (an
e-mail) needs the receiver's idempotency key; make it from the event's id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .event_schema import Event, EventTypes
from .idempotency import Inbox, fingerprint

__all__ = ["Effect", "consumer", "event_fingerprint", "handle_once"]

Effect = Callable[[AsyncConnection, Event], Awaitable[Any]]


async def handle_once(engine: AsyncEngine, consumer: str, event: Event, effect: Effect) -> Any:
    """Run `effect(tx, event)` unless this consumer had the event before; returns the first run's result."""
    return await Inbox(engine, consumer).once(
        event.id, event_fingerprint(event), lambda tx: effect(tx, event)
    )


def consumer(
    engine: AsyncEngine, name: str, types: EventTypes, effect: Effect
) -> Callable[[Event], Awaitable[None]]:
    """A handler for `EventBus.consume`: checks the event against the registry, then applies it once."""

    async def handle(event: Event) -> None:
        types.read(event)  # raises InvalidEvent: the bus quarantines it instead of retrying
        await handle_once(engine, name, event, effect)

    return handle


def event_fingerprint(event: Event) -> str:
    """The fact itself. Time and trace may differ between copies that a retrying producer made."""
    return fingerprint([event.type, event.subject, event.data])

"""What runs beside the workers: publishes the outbox, drives the sagas, feeds the consumers.

The parts do not know each other: each takes its work from the database or the bus, so one may be stopped,
killed or run in a process of its own while the others go on. Any number of these processes may run at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.orders import consumers
from studyhall.orders.events import TOPIC
from studyhall.orders.payments import Payments
from studyhall.orders.saga import buy_pack
from studyhall.patterns.event_bus import EventBus
from studyhall.patterns.outbox_relay import Relay
from studyhall.patterns.saga import SagaRunner

__all__ = ["consume", "drive_sagas", "publish_outbox", "run"]


async def run(
    store: AsyncEngine,
    bus: EventBus,
    payment_url: str,
    *,
    stop: asyncio.Event,
    groups: Sequence[str] = tuple(consumers.GROUPS),
) -> None:
    """All of it until `stop` is set. A part that dies ends the process: a half-working relay helps nobody."""
    # Groups first: some buses keep nothing for a group that subscribes late.
    for group in groups:
        await bus.subscribe(group, [TOPIC])
    async with asyncio.TaskGroup() as parts:
        parts.create_task(publish_outbox(store, bus, stop=stop), name="outbox")
        parts.create_task(drive_sagas(store, payment_url, stop=stop), name="sagas")
        for group in groups:
            parts.create_task(consume(store, bus, group, stop=stop), name=group)


async def publish_outbox(store: AsyncEngine, bus: EventBus, *, stop: asyncio.Event) -> None:
    relay = Relay(store, bus)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_when(stop, relay.stop))
        await relay.run()


async def drive_sagas(
    store: AsyncEngine, payment_url: str, *, stop: asyncio.Event, poll: float = 0.2, lease_margin: float = 5.0
) -> None:
    async with Payments(payment_url) as payments, asyncio.TaskGroup() as tasks:
        runner = SagaRunner(store, buy_pack(payments), lease_margin=lease_margin)
        tasks.create_task(_when(stop, runner.stop))
        await runner.run_forever(poll=poll)


async def consume(store: AsyncEngine, bus: EventBus, group: str, *, stop: asyncio.Event) -> None:
    """One consumer group: `notifications`, `payouts`, `analytics` or `feed`."""
    await bus.consume(group, [TOPIC], consumers.handler(store, group), stop=stop)


async def _when(stop: asyncio.Event, then: Callable[[], None]) -> None:
    await stop.wait()
    then()

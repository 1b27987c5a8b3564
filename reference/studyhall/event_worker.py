"""`studyhall event-worker`: publishes the outbox, drives the sagas, feeds the consumers.

The parts do not know each other: each takes its work from the database or the bus, so one may be stopped,
killed or run in a process of its own while the others go on. Any number of these processes may run at once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.orders import consumers
from studyhall.orders.events import TOPIC
from studyhall.orders.payments import Payments
from studyhall.orders.saga import buy_pack
from studyhall.patterns.core.store import read
from studyhall.patterns.event_bus import EventBus
from studyhall.patterns.idempotency import inbox
from studyhall.patterns.outbox import BUS, outbox
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.reconciliation import Expected, Reconciled, reconcile
from studyhall.patterns.replay import logged, replay
from studyhall.patterns.saga import SagaRunner

log = logging.getLogger("studyhall.event_worker")
RECONCILE_EVERY = 300.0
LOOK_BACK = 24 * 3600.0  # much shorter than the inbox keeps its markers
LATE = 600.0  # seconds after which an event that is neither waiting nor handled is taken for lost


async def run(
    store: AsyncEngine,
    bus: EventBus,
    payment_url: str,
    *,
    stop: asyncio.Event,
    groups: Sequence[str] = tuple(consumers.GROUPS),
) -> None:
    """All of it until `stop` is set. A part that dies ends the process: a half-working event worker helps nobody."""
    # Groups first: some buses keep nothing for a group that subscribes late.
    for group in groups:
        await bus.subscribe(group, [TOPIC])
    async with asyncio.TaskGroup() as parts:
        parts.create_task(publish_outbox(store, bus, stop=stop), name="outbox")
        parts.create_task(drive_sagas(store, payment_url, stop=stop), name="sagas")
        for group in groups:
            parts.create_task(consume(store, bus, group, stop=stop), name=group)
            parts.create_task(_reconcile_now_and_then(store, bus, group, stop=stop), name=f"{group} lost")


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


async def reconcile_events(store: AsyncEngine, bus: EventBus, group: str, *, grace: float = LATE) -> Reconciled | None:
    """Give the group what was published and never reached it: a bus that lost its data tells nobody.

    None when the group still has events to read. Safe while the group runs, and others that do the same:
    everything goes through its inbox.
    """
    if await bus.lag(group):
        return None
    given_up = {entry.event.id for entry in await bus.quarantined(group, 10_000) if entry.event is not None}
    name = consumers.inbox_name(group)

    async def published() -> AsyncIterator[Expected]:
        row, after = outbox.c, 0
        published = (row.destination == BUS, row.type.startswith(f"{TOPIC}."), row.published_at.is_not(None))
        recent = (*published, row.reason.is_(None), row.created_at > time.time() - LOOK_BACK)
        while True:
            page = select(row.position, row.event_id, row.published_at).where(*recent, row.position > after)
            async with read(store) as connection:
                rows = (await connection.execute(page.order_by(row.position).limit(500))).all()
            for position, event_id, at in rows:
                after = position
                if event_id not in given_up:
                    yield Expected(event_id, at)
            if len(rows) < 500:
                return

    async def handled(keys: Collection[str]) -> set[str]:
        markers = select(inbox.c.key).where(inbox.c.consumer == name, inbox.c.key.in_(keys))
        async with read(store) as connection:
            return set((await connection.execute(markers)).scalars())

    async def hand_over(event_id: str) -> None:
        done = await replay(store, name, logged(store, ids=[event_id]), consumers.GROUPS[group])
        if done.failed:
            raise RuntimeError(done.failed[event_id])

    return await reconcile(published(), handled, hand_over, grace=grace)


async def _reconcile_now_and_then(store: AsyncEngine, bus: EventBus, group: str, *, stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            await reconcile_events(store, bus, group)
        except Exception as error:  # the bus or the database is away: looking later does no harm
            log.warning("cannot look for lost events of %s: %r", group, error)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONCILE_EVERY):
                await stop.wait()


async def _when(stop: asyncio.Event, then: Callable[[], None]) -> None:
    await stop.wait()
    then()

"""The whole way: transaction → outbox → relay → Redis Streams → inbox, and what happens to what cannot be read."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from pydantic import BaseModel
from sqlalchemy import Column, Integer, String, Table, insert, select

from harness.waiting import until
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.store import begin, metadata, read
from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus
from studyhall.patterns.event_schema import EventTypes
from studyhall.patterns.inbox import consumer
from studyhall.patterns.outbox import add
from studyhall.patterns.outbox.relay import Relay

seen_by = Table(
    "proof_seen",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("consumer", String),
    Column("event", String),
)


class Placed(BaseModel):
    order: str


class Paid(BaseModel):
    order: str
    cents: int


def registry():
    types = EventTypes()
    types.event("order.placed.v1")(Placed)
    return types


def effect_of(name):
    async def effect(tx, event):
        await tx.execute(insert(seen_by).values(consumer=name, event=event.id))

    return effect


async def seen(store, name):
    async with read(store) as connection:
        query = select(seen_by.c.event).where(seen_by.c.consumer == name).order_by(seen_by.c.number)
        return list((await connection.execute(query)).scalars())


def event(ident, kind="order.placed.v1", **data):
    return Event(id=ident, source="/t", type=kind, subject=ident, data=data)


@pytest.fixture
async def bus(redis_url):
    redis = producer_client(redis_url)
    yield RedisStreamsBus(redis)
    await redis.aclose()


@asynccontextmanager
async def consuming(bus, store, types, *names):
    stop = asyncio.Event()
    for name in names:
        await bus.subscribe(name, ["order"])
    tasks = [
        asyncio.create_task(bus.consume(name, ["order"], consumer(store, name, types, effect_of(name)), stop=stop))
        for name in names
    ]
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 15)


async def test_what_a_consumer_cannot_read_is_quarantined_with_its_reason_and_replayed_after_the_fix(
    store, bus, figures
):
    good = [event(f"good-{n}", order="o") for n in range(10)]
    bad = {
        "unknown-type": event("type", "order.lost.v1"),
        "unknown-version": event("version", "order.placed.v2", order="o"),
        "invalid-data": event("data", order_id="renamed"),
    }
    async with begin(store) as tx:
        await add(tx, *good[:5], *bad.values(), *good[5:])
    await Relay(store, bus).run_once()
    async with consuming(bus, store, registry(), "feed", "payouts"):

        async def settled():
            return await bus.lag("feed") == 0 and await bus.lag("payouts") == 0

        await until(settled, 20, "both groups to finish")
    assert sorted(await seen(store, "feed")) == sorted(e.id for e in good)
    aside = await bus.quarantined("feed")
    by_id = {entry.event.id: entry for entry in aside if entry.event is not None}
    assert set(by_id) == {"type", "version", "data"}
    assert all(entry.deliveries == 1 for entry in aside)  # permanent: no retries
    assert "newer than v1" in by_id["version"].reason
    assert "order: Field required" in by_id["data"].reason

    fixed = registry()  # deployed since: v2 exists
    fixed.event("order.placed.v2")(Placed)
    fixed.upcaster("order.placed.v1")(lambda old: old)
    payouts_before = await seen(store, "payouts")
    replayed = await bus.replay_quarantined("feed", [by_id["version"].id])
    assert replayed == 1
    async with consuming(bus, store, fixed, "feed", "payouts"):

        async def there():
            return "version" in await seen(store, "feed")

        await until(there, 20, "the replayed event")
    assert await seen(store, "payouts") == payouts_before
    assert len(await bus.quarantined("payouts")) == 3
    figures(
        "event-schema",
        name=f"quarantine-{store.dialect.name}",
        good=len(good),
        bad=len(bad),
        quarantined_with_reason=len(aside),
        retries_of_bad=sum(entry.deliveries - 1 for entry in aside),
        replayed_after_fix=replayed,
    )

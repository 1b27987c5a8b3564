"""The relay against every bus: a bus that is down consumes no attempt, whoever else is in the batch."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from sqlalchemy import select

from harness.buses import BUSES, SERVERS, open_bus
from harness.waiting import until
from studyhall.patterns.core.event import MAX_BYTES, Event
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.outbox import add, outbox
from studyhall.patterns.outbox.quarantine import lag, quarantined
from studyhall.patterns.outbox.relay import Relay

TWICE = RetryPolicy(base=0.01, cap=0.02, attempts=2)
HEALTHY = 20


@dataclass(frozen=True)
class Server:
    """A server that can be away for a while."""

    url: str
    away: Callable[[], None]
    back: Callable[[], None]


@pytest.fixture(params=BUSES)
def kind(request):
    return str(request.param)


@pytest.fixture
def server(kind, request, tcp_proxy):
    if kind.startswith("kafka"):  # its clients go to the address the brokers name, past any proxy
        broker = request.getfixturevalue("any_kafka")
        yield Server(broker.url, broker.freeze, broker.thaw)
        broker.thaw()
        return
    parts = urlsplit(request.getfixturevalue(SERVERS[kind.removesuffix("-ordered")]))
    assert parts.port is not None
    proxy = tcp_proxy(parts.port)
    yield Server(
        parts._replace(netloc=parts.netloc.replace(str(parts.port), str(proxy.port))).geturl(), proxy.down, proxy.up
    )


@pytest.fixture
async def bus(kind, server):
    bus = open_bus(kind, server.url, f"t{uuid.uuid4().hex[:10]}")
    if hasattr(bus, "confirm_within"):
        bus.confirm_within = 2.0
    yield bus
    await asyncio.wait_for(bus.close(), 30)
    if (client := getattr(bus, "redis", None)) is not None:
        await client.aclose()


@pytest.fixture
async def sqlite(tmp_path):
    """One store is enough here: both behave the same towards the bus."""
    engine = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    await create_all(engine)
    yield engine
    await close(engine)


@asynccontextmanager
async def running(relay):
    task = asyncio.create_task(relay.run())
    try:
        yield
    finally:
        relay.stop()
        await asyncio.wait_for(task, 30)


def event(ident, type="order.changed.v1", **data):
    return Event(id=ident, source="/t", type=type, subject=ident, data=data)


async def put(store, *events):
    async with begin(store) as tx:
        await add(tx, *events)


async def consumed(store):
    """Attempts of every event that cost one."""
    async with read(store) as connection:
        rows = await connection.execute(select(outbox.c.event_id, outbox.c.attempts).where(outbox.c.attempts > 0))
        return {row.event_id: row.attempts for row in rows}


async def test_a_bus_that_is_down_costs_nobody_an_attempt_beside_events_that_it_would_never_take(sqlite, bus, server):
    await bus.subscribe("group", ["order"])
    relay = Relay(sqlite, bus, policy=TWICE, poll=0.05)
    async with running(relay):
        await put(sqlite, event("first"))
        await until(lambda: relay.counts.published == 1, 30, "the way to the bus")
        server.away()
        try:
            refused = event("huge", text="x" * MAX_BYTES), event("misnamed", "no such topic.v1")
            healthy = [event(f"healthy-{n}") for n in range(HEALTHY)]
            await put(sqlite, *healthy[:10], *refused, *healthy[10:])
            await until(lambda: relay.counts.outages > TWICE.attempts, 200, "more outages than attempts")
            assert set(await consumed(sqlite)) <= {"huge", "misnamed"}
        finally:
            server.back()
        await until(lambda: relay.counts.published == 1 + HEALTHY, 60, "everything after the outage")

        async def settled():
            return (await lag(sqlite)).waiting == 0

        await until(settled, 30, "the refused ones to be put aside")
    assert {row.event_id for row in await quarantined(sqlite)} == {"huge", "misnamed"}
    assert set(await consumed(sqlite)) == {"huge", "misnamed"}

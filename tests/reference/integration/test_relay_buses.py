"""The relay against every bus: a bus that is down consumes no attempt, whoever else is in the batch."""

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from sqlalchemy import select

from harness.buses import BUSES, SERVERS, close_bus, open_bus
from harness.relays import put, running
from harness.waiting import until
from studyhall.patterns.core.event import MAX_BYTES, Event
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.store import read
from studyhall.patterns.outbox import outbox
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


# "nats-ordered" publishes as "nats" does
@pytest.fixture(
    params=[*[name for name in BUSES if name != "nats-ordered"], pytest.param("nats-ordered", marks=pytest.mark.slow)]
)
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
    bus = open_bus(kind, server.url)
    if hasattr(bus, "confirm_within"):
        bus.confirm_within = 2.0
    yield bus
    await close_bus(bus)


def event(ident, type="order.changed.v1", **data):
    return Event(id=ident, source="/t", type=type, subject=ident, data=data)


async def consumed(store):
    """Attempts of every event that cost one."""
    async with read(store) as connection:
        rows = await connection.execute(select(outbox.c.event_id, outbox.c.attempts).where(outbox.c.attempts > 0))
        return {row.event_id: row.attempts for row in rows}


# One store is enough here: both behave the same towards the bus.
@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
async def test_a_bus_that_is_down_costs_nobody_an_attempt_beside_events_that_it_would_never_take(store, bus, server):
    await bus.subscribe("group", ["order"])
    relay = Relay(store, bus, policy=TWICE, poll=0.05)
    async with running(relay, 30):
        await put(store, event("first"))
        await until(lambda: relay.counts.published == 1, 30, "the way to the bus")
        server.away()
        try:
            refused = event("huge", text="x" * MAX_BYTES), event("misnamed", "no such topic.v1")
            healthy = [event(f"healthy-{n}") for n in range(HEALTHY)]
            await put(store, *healthy[:10], *refused, *healthy[10:])
            await until(lambda: relay.counts.outages > TWICE.attempts, 200, "more outages than attempts")
            assert set(await consumed(store)) <= {"huge", "misnamed"}
        finally:
            server.back()
        await until(lambda: relay.counts.published == 1 + HEALTHY, 60, "everything after the outage")

        async def settled():
            return (await lag(store)).waiting == 0

        await until(settled, 30, "the refused ones to be put aside")
    assert {row.event_id for row in await quarantined(store)} == {"huge", "misnamed"}
    assert set(await consumed(store)) == {"huge", "misnamed"}

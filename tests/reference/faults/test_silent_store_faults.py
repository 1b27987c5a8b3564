"""PostgreSQL behind a network that silently swallows bytes: what recovers, and how soon."""

import asyncio
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from sqlalchemy import event, select

from harness.relays import Sink
from harness.waiting import until
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import SILENCE, close, create_all, open_store
from studyhall.patterns.core.store import ANSWER, answers_within, begin, read
from studyhall.patterns.outbox import add, outbox
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.saga import DbStep, Saga, SagaRunner, SagaStep
from studyhall.patterns.saga import store as saga_store

pytestmark = pytest.mark.needs_postgres
BACK = 20.0  # seconds: the promise. Tests wait twice that, for a busy machine.


@pytest.fixture
async def direct(postgres_url):
    store = open_store(postgres_url)
    await create_all(store)
    yield store
    await close(store)


@pytest.fixture
def network(postgres_url, tcp_proxy):
    port = urlsplit(postgres_url).port
    assert port is not None
    return tcp_proxy(port)


@pytest.fixture
async def proxied(direct, postgres_url, network):
    """The same database through that network, with the connect timeout that users have."""
    url = postgres_url.partition("?")[0]
    store = open_store(url.replace(str(network.target), str(network.port)))
    yield store
    await asyncio.wait_for(close(store), 30)


async def put(store, ident):
    async with begin(store) as tx:
        await add(tx, Event(id=ident, source="/t", type="order.changed.v1", subject=ident))


@asynccontextmanager
async def running(work, stop):
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        stop()
        await asyncio.wait_for(task, 2 * BACK)


@pytest.mark.slow
async def test_a_relay_is_back_soon_after_its_connections_fell_silent(direct, proxied, network):
    """Between two transactions: the pool's own ping meets the silence, so it need not count as an outage."""
    sink = Sink()
    relay = Relay(proxied, sink, poll=0.2)

    async def written_down():
        async with read(direct) as tx:
            return await tx.scalar(select(outbox.c.published_at)) is not None

    async with running(relay.run(), relay.stop):
        await put(direct, "before")
        await until(written_down, 20, "the first event")
        assert network.swallow() >= 1
        silent = time.monotonic()
        await put(direct, "after")
        await until(lambda: "after" in sink.ids, 2 * BACK, "the relay to be back")
        assert time.monotonic() - silent < BACK
    assert network.swallowed > 0, "nothing was swallowed"


@pytest.mark.slow
async def test_a_relay_is_back_soon_after_silence_in_the_middle_of_its_transaction(direct, proxied, network):
    """The server hears no COMMIT and keeps the row's lock, which the relay needs next; it kept it for a minute."""
    sink = Sink()
    relay = Relay(proxied, sink, poll=0.2)
    silent = []

    def at_commit(_):
        if sink.ids and not silent:  # the note that it is published
            network.swallow()
            silent.append(time.monotonic())

    event.listen(proxied.sync_engine, "commit", at_commit)
    async with running(relay.run(), relay.stop):
        await put(direct, "before")
        await until(lambda: silent, 20, "the commit of the first event")
        await put(direct, "after")
        await until(lambda: "after" in sink.ids, 2 * BACK, "the relay to be back")
        assert time.monotonic() - silent[0] < BACK
    assert relay.counts.outages >= 1, "nothing was swallowed"
    assert network.swallowed > 0
    assert sink.ids == ["before", "after"], "it was published again while the lease lasted"


@pytest.mark.slow
async def test_a_saga_runner_is_back_soon_after_its_connections_fell_silent(direct, proxied, network):
    """One saga is in the middle of a step then, the other starts afterwards."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_):
        reached.set()
        await go_on.wait()

    async def inside(_, __): ...

    trip = Saga("trip", [SagaStep("a", wait), DbStep("b", inside)])
    runner = SagaRunner(proxied, trip, lease_margin=1.0)

    async def start(saga_id):
        async with begin(direct) as tx:
            await SagaRunner(direct, trip).start(tx, "trip", saga_id, {})

    async def completed():
        return {saga.id for saga in await saga_store.list_sagas(direct, state="completed")}

    async with running(runner.run_forever(poll=0.1), runner.stop):
        await start("first")
        await asyncio.wait_for(reached.wait(), 20)
        network.swallow()
        go_on.set()
        silent = time.monotonic()
        await start("second")

        async def both():
            return await completed() == {"first", "second"}

        await until(both, 2 * BACK, "both sagas")
        # The first waits for the end of its lease besides: ten seconds for its step, and the margin.
        assert time.monotonic() - silent < BACK


async def test_a_statement_that_is_answered_in_time_is_left_alone(direct):
    with answers_within(0.5):
        async with direct.connect() as connection:
            for _ in range(3):
                await connection.exec_driver_sql("SELECT pg_sleep(0.3)")
    assert ANSWER > SILENCE

"""What must neither end a relay nor consume an attempt of an innocent event, on SQLite and PostgreSQL."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from sqlalchemy import select

from harness.relays import Sink, put, running
from harness.waiting import until
from studyhall.patterns.core import open_store as opening
from studyhall.patterns.core.errors import Permanent, Transient
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import read
from studyhall.patterns.outbox import outbox
from studyhall.patterns.outbox.claims import Failure, claim, settle
from studyhall.patterns.outbox.quarantine import discard, lag, quarantined
from studyhall.patterns.outbox.relay import Relay

SOON = RetryPolicy(base=0.01, cap=0.02, attempts=3)


def event(ident, **data):
    return Event(id=ident, source="/t", type="order.changed.v1", subject=ident, data=data)


@pytest.fixture
async def small_pool(store_url, monkeypatch):
    """A store whose pool gives up after 0.2 s, not after 10."""
    monkeypatch.setattr(opening, "LOCK_WAIT", 0.2)
    engine = open_store(store_url)
    await create_all(engine)
    yield engine
    await close(engine)


async def test_a_pool_without_a_free_connection_does_not_end_the_relay(small_pool):
    sink = Sink()
    relay = Relay(small_pool, sink, poll=0.05)
    await put(small_pool, event("before"))
    async with AsyncExitStack() as holders:
        pool = small_pool.pool
        for _ in range(pool.size() + pool._max_overflow):
            await holders.enter_async_context(small_pool.connect())
        async with running(relay, 20) as task:
            await until(lambda: task.done() or relay.counts.outages >= 3, 20, "the relay to find no connection")
            assert not task.done()
            await holders.aclose()
            await put(small_pool, event("after"))
            await until(lambda: {"before", "after"} <= set(sink.ids), 20, "both events")


async def test_a_publisher_that_raises_a_stray_cancellation_does_not_end_the_relay(store):
    """What `.result()` of a cancelled future raises: nobody told the relay to end."""
    strays = iter([True, True])

    def stray(_):
        if next(strays, False):
            raise asyncio.CancelledError

    await put(store, event("a"))
    sink = Sink(stray)
    async with running(Relay(store, sink, poll=0.05, policy=SOON), 20):
        await until(lambda: sink.ids == ["a"], 20, "the event")


async def test_a_relay_that_is_cancelled_ends_and_releases_its_batch(store):
    hanging = asyncio.Event()

    class Hangs(Sink):
        async def publish(self, events):
            hanging.set()
            await asyncio.Event().wait()
            return []

    await put(store, event("a"))
    task = asyncio.create_task(Relay(store, Hangs(), lease=600).run())
    await asyncio.wait_for(hanging.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert await Relay(store, Sink()).run_once() == 1


class Unspeakable(Transient):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error",
    [Transient("a NUL \x00 in it"), Transient("half a character \ud800"), Unspeakable(), Permanent("\x00\ud800")],
    ids=["nul", "surrogate", "str-raises", "permanent"],
)
async def test_whatever_an_error_says_the_relay_goes_on_and_publishes_the_others_once(store, error):
    await put(store, event("bad"), *(event(f"good-{n}") for n in range(50)))
    sink = Sink(lambda e: error if e.id == "bad" else None)
    relay = Relay(store, sink, poll=0.05, policy=SOON, lease=1.0)  # short: unsettled events would come back
    async with running(relay, 20) as task:

        async def given_up():
            return task.done() or bool(await quarantined(store))

        await until(given_up, 20, "the bad event to be given up")
        await put(store, event("later"))
        await until(lambda: task.done() or "later" in sink.ids, 20, "a later event")
        assert not task.done()
    assert sorted(sink.ids) == sorted([*(f"good-{n}" for n in range(50)), "later"])
    assert (await lag(store)).waiting == 0
    [row] = await quarantined(store)
    assert row.event_id == "bad"
    assert type(error).__name__ in row.reason
    assert await discard(store, ["bad"], "by hand \x00 \ud800") == 1


async def test_what_was_published_is_recorded_whatever_is_wrong_with_the_rest(store):
    """The store refuses the note about the failed event: the published ones are still settled."""
    await put(store, event("good"), event("bad"))
    good, bad = await claim(store, "w", 10, 30)
    unstorable = Failure(bad.position, "because", None, consume_attempt="?")
    with pytest.raises(ValueError, match="invalid literal"):
        await settle(store, "w", published=[good.position], failed=[unstorable])
    async with read(store) as connection:
        rows = await connection.execute(select(outbox.c.event_id).where(outbox.c.published_at.is_not(None)))
        assert rows.scalars().all() == ["good"]

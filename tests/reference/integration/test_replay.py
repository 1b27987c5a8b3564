"""Replay to one consumer, with the others as witnesses."""

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

from sqlalchemy import Column, Integer, String, Table, delete, insert, select, text, update

from harness.buses import open_bus
from harness.waiting import until
from studyhall.patterns.core.errors import Transient
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.store import begin, is_postgres, metadata, read
from studyhall.patterns.idempotency import inbox
from studyhall.patterns.idempotency import purge as forget
from studyhall.patterns.inbox import handle_once
from studyhall.patterns.outbox import add
from studyhall.patterns.outbox.quarantine import purge
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.replay import logged, replay

CONSUMERS = ("feed", "payouts", "analytics")
effects = Table(
    "proof_effects",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("consumer", String),
    Column("event", String),
)


class Bus:
    """Hands every published event to every consumer, each through its inbox."""

    def __init__(self, store, lose=lambda _c, _e: False):
        self._store, self._lose = store, lose

    async def publish(self, events):
        for event in events:
            for consumer in CONSUMERS:
                if not self._lose(consumer, event):
                    await handle_once(self._store, consumer, event, effect_of(consumer))
        return [None] * len(events)


def effect_of(consumer):
    async def effect(tx, event):
        await tx.execute(insert(effects).values(consumer=consumer, event=event.id))

    return effect


async def applied(store, consumer):
    async with read(store) as connection:
        query = select(effects.c.event).where(effects.c.consumer == consumer).order_by(effects.c.number)
        return list((await connection.execute(query)).scalars())


def event(n):
    return Event(id=f"e-{n}", source="/t", type="order.changed.v1", subject=f"order-{n % 4}", data={"n": n})


async def publish(store, count, lose):
    async with begin(store) as tx:
        await add(tx, *(event(n) for n in range(count)))
    relay = Relay(store, Bus(store, lose))
    while await relay.run_once():
        pass


ALL = [f"e-{n}" for n in range(20)]


async def test_replay_gives_one_consumer_what_it_missed_and_touches_no_other(store, figures):
    await publish(store, 20, lambda consumer, e: consumer == "analytics" and e.data["n"] >= 12)
    before = {consumer: await applied(store, consumer) for consumer in CONSUMERS}
    assert len(before["analytics"]) == 12  # lost eight: its code threw them away

    report = await replay(store, "analytics", logged(store), effect_of("analytics"))
    assert (report.read, report.applied, report.skipped) == (20, 8, 12)
    after = {consumer: await applied(store, consumer) for consumer in CONSUMERS}
    assert sorted(after["analytics"]) == sorted(ALL)
    others = [consumer for consumer in CONSUMERS if consumer != "analytics"]
    assert all(after[consumer] == before[consumer] for consumer in others)

    again = await replay(store, "analytics", logged(store), effect_of("analytics"))
    assert (again.applied, again.skipped) == (0, 20)

    # The naive replay publishes the range on the bus once more, and everybody gets it again.
    async def publish_again(after):
        async for e in logged(store, after=after):
            for consumer in CONSUMERS:
                async with begin(store) as tx:
                    await effect_of(f"naive-{consumer}")(tx, e)

    await publish_again(after=0)
    await publish_again(after=12)
    payouts = await applied(store, "naive-payouts")
    paid_twice = len(payouts) - len(set(payouts))
    assert paid_twice == 8
    figures(
        "replay",
        name=f"one-consumer-{store.dialect.name}",
        events=report.read,
        missed=len(ALL) - len(before["analytics"]),
        applied=report.applied,
        duplicated=len(after["analytics"]) - len(set(after["analytics"])),
        others_duplicated=sum(len(after[consumer]) - len(before[consumer]) for consumer in others),
        naive_others_duplicated_each=paid_twice,
    )


async def test_force_applies_again_in_order_and_only_for_that_consumer(store):
    await publish(store, 20, lambda _c, _e: False)
    payouts = await applied(store, "payouts")
    async with begin(store) as tx:
        await tx.execute(delete(effects).where(effects.c.consumer == "feed"))  # a projection built again
    effect = effect_of("feed")
    assert (await replay(store, "feed", logged(store), effect)).applied == 0
    report = await replay(store, "feed", logged(store, after=5, until=15), effect, force=True)
    assert report.applied == 10
    assert await applied(store, "feed") == ALL[5:15]
    assert await applied(store, "payouts") == payouts
    # The markers are back: a late duplicate from the bus does nothing.
    await handle_once(store, "feed", event(7), effect)
    assert await applied(store, "feed") == ALL[5:15]


async def test_a_forced_effect_that_fails_leaves_the_old_marker(store):
    await publish(store, 4, lambda _c, _e: False)

    async def broken(tx, e):
        await tx.execute(insert(effects).values(consumer="feed", event="half"))
        raise Transient("disk full")

    report = await replay(store, "feed", logged(store), broken, force=True)
    assert len(report.failed) == 4
    assert "half" not in await applied(store, "feed")
    assert (await replay(store, "feed", logged(store), effect_of("feed"))).skipped == 4


async def test_a_failing_event_holds_its_subject_and_is_reported(store):
    await publish(store, 12, lambda consumer, _: consumer == "analytics")
    plain = effect_of("analytics")

    async def picky(tx, e):
        if e.id == "e-1":
            raise Transient("still broken")
        await plain(tx, e)

    report = await replay(store, "analytics", logged(store), picky)
    assert list(report.failed) == ["e-1"]
    assert report.held == ["e-5", "e-9"]
    assert report.applied == 9


async def test_a_range_is_chosen_by_position_by_time_or_by_id(store):
    await publish(store, 10, lambda _c, _e: False)

    async def ids(events):
        return [e.id async for e in events]

    now = datetime.now(UTC)
    assert await ids(logged(store, batch=3)) == ALL[:10]
    assert await ids(logged(store, after=2, until=4)) == ["e-2", "e-3"]
    assert await ids(logged(store, ids=["e-9", "e-1"])) == ["e-1", "e-9"]
    assert await ids(logged(store, since=now + timedelta(hours=1))) == []
    assert await ids(logged(store, since=now - timedelta(hours=1), before=now + timedelta(hours=1))) == ALL[:10]


async def test_purged_and_unpublished_events_are_not_replayed(store):
    await publish(store, 3, lambda _c, _e: False)
    await purge(store, -1)
    async with begin(store) as tx:
        await add(tx, event(99))
    assert [e.id async for e in logged(store)] == []


async def test_replay_beside_the_running_consumer_loses_nothing_and_repeats_no_effect(store, redis_url):
    """Nor does a renamed group that keeps the name of its inbox, though it gets everything again."""
    await publish(store, 20, lambda consumer, e: consumer == "feed" and e.data["n"] % 3 == 0)
    bus, stop = open_bus("redis-ordered", redis_url), asyncio.Event()
    feed = effect_of("feed")
    delivered = []

    async def handle(e):
        await handle_once(store, "feed", e, feed)
        delivered.append(e.id)

    async with begin(store) as tx:
        await add(tx, *(event(n) for n in range(20, 60)))
    live = asyncio.create_task(bus.consume("feed", ["order"], handle, stop=stop))
    relay = Relay(store, bus, batch=4)
    while await relay.run_once() or len(delivered) < 40:
        # Everything there is, also what the consumer is being given right now.
        assert not (await replay(store, "feed", logged(store), feed)).failed
    renamed = asyncio.create_task(bus.consume("feed-2", ["order"], handle, stop=stop))
    await until(lambda: len(delivered) >= 80, 60, "the renamed group has had everything")
    stop.set()
    await asyncio.gather(live, renamed)
    await bus.redis.aclose()
    assert Counter(await applied(store, "feed")) == Counter(f"e-{n}" for n in range(60))
    assert await applied(store, "payouts") == ALL, "another consumer noticed"


async def test_a_forced_replay_comes_after_the_live_delivery_of_the_same_event(store):
    await publish(store, 4, lambda consumer, _e: consumer == "feed")
    begun, go_on = asyncio.Event(), asyncio.Event()
    effect = effect_of("feed")

    async def slow(tx, e):
        await effect(tx, e)
        begun.set()
        await go_on.wait()

    live = asyncio.create_task(handle_once(store, "feed", event(0), slow))
    await begun.wait()
    forced = asyncio.create_task(replay(store, "feed", logged(store), effect, force=True))

    async def waits():
        if not is_postgres(store):  # in the process, for its turn to write
            return True
        async with read(store) as connection:
            return bool((await connection.execute(text("SELECT 1 FROM pg_locks WHERE NOT granted"))).all())

    await until(waits, 30, "the replay waits for the live one")
    go_on.set()
    await live
    report = await forced
    assert (report.failed, report.applied) == ({}, 4)
    assert await applied(store, "feed") == ["e-0", *ALL[:4]]


async def test_duplicates_around_a_purge_repeat_only_what_is_older_than_the_markers_are_kept(store):
    """The stated price: one more effect, however many copies come late."""
    feed = effect_of("feed")

    async def deliver(*numbers):
        for n in numbers:
            await handle_once(store, "feed", event(n), feed)

    await deliver(*range(10))
    async with begin(store) as tx:
        await tx.execute(update(inbox).values(at=time.time() - 3600))
    await deliver(*range(10, 20))
    copies = [deliver(n) for _ in range(3) for n in range(20)]
    answers = await asyncio.gather(forget(store, 1800), *copies, forget(store, 1800), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    assert all(isinstance(error, Transient) for error in errors), errors
    await deliver(*range(10))  # as a bus does after such an error
    assert Counter(await applied(store, "feed")) == {f"e-{n}": 2 if n < 10 else 1 for n in range(20)}

"""Replay to one consumer, with the others as witnesses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, String, Table, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from studyhall.patterns.core.errors import Transient
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.store import begin, metadata, read
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

    def __init__(self, store: AsyncEngine, lose: Callable[[str, Event], bool] = lambda _c, _e: False) -> None:
        self._store, self._lose = store, lose

    async def publish(self, events: list[Event]) -> list[Exception | None]:
        for event in events:
            for consumer in CONSUMERS:
                if not self._lose(consumer, event):
                    await handle_once(self._store, consumer, event, effect_of(consumer))
        return [None] * len(events)


def effect_of(consumer: str) -> Callable[[AsyncConnection, Event], object]:
    async def effect(tx: AsyncConnection, event: Event) -> None:
        await tx.execute(insert(effects).values(consumer=consumer, event=event.id))

    return effect


async def applied(store: AsyncEngine, consumer: str) -> list[str]:
    async with read(store) as connection:
        found = select(effects.c.event).where(effects.c.consumer == consumer).order_by(effects.c.number)
        return list((await connection.execute(found)).scalars())


def event(n: int) -> Event:
    return Event(id=f"e-{n}", source="/t", type="order.changed.v1", subject=f"order-{n % 4}", data={"n": n})


async def publish(store: AsyncEngine, count: int, lose: Callable[[str, Event], bool]) -> None:
    async with begin(store) as tx:
        await add(tx, *(event(n) for n in range(count)))
    relay = Relay(store, Bus(store, lose))  # type: ignore[arg-type]
    while await relay.run_once():
        pass


ALL = [f"e-{n}" for n in range(20)]


async def test_replay_gives_one_consumer_what_it_missed_and_touches_no_other(
    store: AsyncEngine, figures: Callable[..., Path]
) -> None:
    await publish(store, 20, lambda consumer, e: consumer == "analytics" and e.data["n"] >= 12)
    before = {consumer: await applied(store, consumer) for consumer in CONSUMERS}
    assert len(before["analytics"]) == 12  # lost eight: its code threw them away

    report = await replay(store, "analytics", logged(store), effect_of("analytics"))  # type: ignore[arg-type]
    assert (report.read, report.applied, report.skipped) == (20, 8, 12)
    after = {consumer: await applied(store, consumer) for consumer in CONSUMERS}
    assert sorted(after["analytics"]) == sorted(ALL)
    others = [consumer for consumer in CONSUMERS if consumer != "analytics"]
    assert all(after[consumer] == before[consumer] for consumer in others)

    again = await replay(store, "analytics", logged(store), effect_of("analytics"))  # type: ignore[arg-type]
    assert (again.applied, again.skipped) == (0, 20)

    # The naive replay publishes the range on the bus once more, and everybody gets it again.
    async def publish_again(after: int) -> None:
        async for e in logged(store, after=after):
            for consumer in CONSUMERS:
                async with begin(store) as tx:
                    await effect_of(f"naive-{consumer}")(tx, e)  # type: ignore[misc]

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


async def test_force_applies_again_in_order_and_only_for_that_consumer(store: AsyncEngine) -> None:
    await publish(store, 20, lambda _c, _e: False)
    payouts = await applied(store, "payouts")
    async with begin(store) as tx:
        await tx.execute(delete(effects).where(effects.c.consumer == "feed"))  # a projection built again
    effect = effect_of("feed")
    assert (await replay(store, "feed", logged(store), effect)).applied == 0  # type: ignore[arg-type]
    report = await replay(store, "feed", logged(store, after=5, until=15), effect, force=True)  # type: ignore[arg-type]
    assert report.applied == 10
    assert await applied(store, "feed") == ALL[5:15]
    assert await applied(store, "payouts") == payouts
    # The markers are back: a late duplicate from the bus does nothing.
    await handle_once(store, "feed", event(7), effect)  # type: ignore[arg-type]
    assert await applied(store, "feed") == ALL[5:15]


async def test_a_forced_effect_that_fails_leaves_the_old_marker(store: AsyncEngine) -> None:
    await publish(store, 4, lambda _c, _e: False)

    async def broken(tx: AsyncConnection, e: Event) -> None:
        await tx.execute(insert(effects).values(consumer="feed", event="half"))
        raise Transient("disk full")

    report = await replay(store, "feed", logged(store), broken, force=True)
    assert len(report.failed) == 4
    assert "half" not in await applied(store, "feed")
    assert (await replay(store, "feed", logged(store), effect_of("feed"))).skipped == 4  # type: ignore[arg-type]


async def test_a_failing_event_holds_its_subject_and_is_reported(store: AsyncEngine) -> None:
    await publish(store, 12, lambda consumer, _: consumer == "analytics")
    plain = effect_of("analytics")

    async def picky(tx: AsyncConnection, e: Event) -> None:
        if e.id == "e-1":
            raise Transient("still broken")
        await plain(tx, e)  # type: ignore[misc]

    report = await replay(store, "analytics", logged(store), picky)
    assert list(report.failed) == ["e-1"]
    assert report.held == ["e-5", "e-9"]
    assert report.applied == 9


async def test_a_range_is_chosen_by_position_by_time_or_by_id(store: AsyncEngine) -> None:
    await publish(store, 10, lambda _c, _e: False)

    async def ids(found: AsyncIterator[Event]) -> list[str]:
        return [e.id async for e in found]

    now = datetime.now(UTC)
    assert await ids(logged(store, batch=3)) == ALL[:10]
    assert await ids(logged(store, after=2, until=4)) == ["e-2", "e-3"]
    assert await ids(logged(store, ids=["e-9", "e-1"])) == ["e-1", "e-9"]
    assert await ids(logged(store, since=now + timedelta(hours=1))) == []
    assert (
        await ids(logged(store, since=now - timedelta(hours=1), before=now + timedelta(hours=1))) == ALL[:10]
    )


async def test_purged_and_unpublished_events_are_not_replayed(store: AsyncEngine) -> None:
    await publish(store, 3, lambda _c, _e: False)
    await purge(store, -1)
    async with begin(store) as tx:
        await add(tx, event(99))
    assert [e.id async for e in logged(store)] == []


@pytest.mark.parametrize("deliveries", [1, 5])
async def test_inbox_applies_an_event_once_per_consumer(store: AsyncEngine, deliveries: int) -> None:
    for _ in range(deliveries):
        for consumer in CONSUMERS:
            await handle_once(store, consumer, event(1), effect_of(consumer))  # type: ignore[arg-type]
    assert [await applied(store, consumer) for consumer in CONSUMERS] == [["e-1"]] * 3

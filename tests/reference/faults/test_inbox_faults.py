"""A consumer killed before and after its effect: delivered again, effect once."""

import asyncio
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

from harness.waiting import until
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import create_all
from studyhall.patterns.core.store import is_postgres, read
from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))

from inbox_consumers import effects  # noqa: E402

EVENTS = 20


@pytest.mark.fault
async def test_a_consumer_killed_before_and_after_its_effect_applies_every_event_once(
    store, store_url, redis_url, spawn, figures
):
    await create_all(store)
    redis = producer_client(redis_url)
    bus = RedisStreamsBus(redis)
    events = [Event(id=f"e-{n}", source="/t", type="order.paid.v1", subject=f"o-{n}") for n in range(EVENTS)]
    assert await bus.publish(events) == [None] * EVENTS

    async def applied(mode, *kills):
        """Run consumers of this mode: one that dies at each of `kills`, then one that lives."""
        await bus.subscribe(mode, ["order"])
        for die_at in kills:
            victim = spawn(PROGRAMS / "inbox_consumers.py", mode, store_url, redis_url, die_at)
            assert await victim.exited(60) == -9, f"{die_at}: it was to be killed"
        last = spawn(PROGRAMS / "inbox_consumers.py", mode, store_url, redis_url, "never")

        async def finished():
            return await bus.lag(mode) == 0

        await until(finished, 60, f"{mode} to finish every event")
        last.terminate()
        assert await last.exited(20) == 0
        async with read(store) as connection:
            return list((await connection.execute(select(effects.c.event).where(effects.c.mode == mode))).scalars())

    naive = {}
    moments = ("before", "after")  # of the kills
    if is_postgres(store):  # the naive fault is not the database's: once is enough
        ours = await applied("with_inbox", *moments)
    else:
        ours, first, last = await asyncio.gather(
            applied("with_inbox", *moments), applied("mark_first", "before"), applied("mark_last", "after")
        )
        naive["naive_mark_first_lost"] = EVENTS - len(set(first))
        naive["naive_mark_last_duplicated"] = len(last) - len(set(last))
        assert naive["naive_mark_first_lost"] >= 1
        assert naive["naive_mark_last_duplicated"] >= 1
    assert sorted(ours) == sorted(event.id for event in events)
    figures(
        "inbox",
        name=f"kills-{store.dialect.name}",
        events=EVENTS,
        kills=len(moments),
        lost=EVENTS - len(set(ours)),
        duplicated=len(ours) - len(set(ours)),
        **naive,
    )
    await redis.aclose()

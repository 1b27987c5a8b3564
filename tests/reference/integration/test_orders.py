"""Orders from the counter to the feed: real relay processes, Redis Streams, payment sandbox, both databases."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import func, select

from harness.waiting import until
from studyhall import event_worker
from studyhall.orders import service
from studyhall.orders.db import analytics, feed_entries, notifications, orders, packs, payouts
from studyhall.orders.events import TOPIC
from studyhall.orders.payments import Payments
from studyhall.orders.saga import buy_pack
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus
from studyhall.patterns.outbox import add, outbox
from studyhall.patterns.outbox import quarantine as outbox_upkeep
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.saga import SagaRunner
from studyhall.patterns.saga import store as saga_store

RELAY = Path(__file__).parent / "programs" / "orders_relay.py"
EFFECTS = {"notifications": notifications, "payouts": payouts, "analytics": analytics, "feed": feed_entries}


@pytest_asyncio.fixture
async def payment_url(spawn, tmp_path):
    sandbox = spawn("studyhall.payment_sandbox", "--data-dir", tmp_path / "payments")
    return str(json.loads(await sandbox.line('"url"'))["url"])


@pytest_asyncio.fixture
async def shop(store):
    async with begin(store) as tx:
        await service.seed_packs(tx)
    return store


async def place(store, **order):
    order = {"pack_id": "biology-101", "customer": "ann", **order}
    async with begin(store) as tx:
        return await service.place_order(tx, **order)


async def count(store, table):
    async with read(store) as tx:
        return int((await tx.execute(select(func.count()).select_from(table))).scalar_one())


async def test_order_event_and_saga_commit_together_or_not_at_all(shop):
    async def failing_caller():
        async with begin(shop) as tx:
            await service.place_order(tx, pack_id="biology-101", customer="ann")
            raise RuntimeError("the request failed after all")

    with pytest.raises(RuntimeError):
        await failing_caller()
    assert [await count(shop, table) for table in (orders, outbox, saga_store.sagas)] == [0, 0, 0]
    await place(shop)
    assert [await count(shop, table) for table in (orders, outbox, saga_store.sagas)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"pack_id": "nope"}, "packs: biology-101"),
        ({"seats": 0}, "seats must be 1 to"),
        ({"seats": 51}, "seats must be 1 to"),
        ({"customer": " "}, "customer is missing"),
    ],
)
async def test_impossible_order_is_refused_with_a_reason(shop, order, why):
    with pytest.raises(service.OrderRefused, match=why):
        await place(shop, **order)
    assert await count(shop, orders) == 0


async def test_last_seats_are_sold_once(shop, payment_url):
    placed = [await place(shop, pack_id="chess-endgames") for _ in range(5)]  # it has three seats
    async with Payments(payment_url) as payments:
        runner = SagaRunner(shop, buy_pack(payments))
        while await runner.resume_due():
            pass
    statuses = Counter([(await service.show_order(shop, order_id))["status"] for order_id in placed])
    assert statuses == {"confirmed": 3, "cancelled": 2}
    async with read(shop) as tx:
        assert await tx.scalar(select(packs.c.seats_free).where(packs.c.id == "chess-endgames")) == 0
    reasons = {row["reason"] for row in await service.list_orders(shop, status="cancelled")}
    assert all("SoldOut" in reason for reason in reasons)


async def test_order_can_be_cancelled_until_it_is_confirmed(shop, payment_url):
    stopped, confirmed = await place(shop, order_id="o1"), await place(shop, order_id="o2")
    async with begin(shop) as tx:
        await service.cancel_order(tx, stopped)
    async with Payments(payment_url) as payments:
        runner = SagaRunner(shop, buy_pack(payments))
        while await runner.resume_due():
            pass
        assert await payments.find("anything") is None
    assert (await service.show_order(shop, stopped))["status"] == "cancelled"
    assert (await saga_store.load(shop, stopped)).state == "compensated"
    with pytest.raises(service.OrderRefused, match="is confirmed"):
        async with begin(shop) as tx:
            await service.cancel_order(tx, confirmed)
    with pytest.raises(service.OrderRefused, match="unknown"):
        async with begin(shop) as tx:
            await service.cancel_order(tx, "nope")


@pytest.mark.fault
async def test_each_consumer_acts_once_per_order_under_duplicates_and_a_killed_relay(
    shop, store_url, redis_url, payment_url, spawn
):
    args = (store_url, redis_url, payment_url)
    relays = [spawn(RELAY, *args) for _ in range(2)]
    for each in relays:
        await each.line("ready")
    bus = RedisStreamsBus(producer_client(redis_url), dedup_window=0)
    seen = Counter()  # a consumer without an inbox

    async def count_without_inbox(event):
        seen[event.id] += event.name == "order.confirmed"

    stop = asyncio.Event()
    naive = asyncio.create_task(bus.consume("naive", [TOPIC], count_without_inbox, stop=stop))
    good = [await place(shop, order_id=f"good-{n}") for n in range(12)]
    bad = [await place(shop, order_id=f"bad-{n}", method="card_declined") for n in range(3)]
    await until(lambda: _confirmed(shop, 3), 30, what="the first orders are through")
    relays[0].kill()
    await _end_leases(shop, relays[0].pid)

    async def all_published():
        sagas = await saga_store.list_sagas(shop)
        return all(saga.due_at is None for saga in sagas) and not (await outbox_upkeep.lag(shop)).waiting

    await until(all_published, 60, what="the other relay finished every saga and published every event")
    async with read(shop) as tx:
        events = [Event.decode(body) for body in await tx.scalars(select(outbox.c.body))]
    assert len(events) == 2 * len(good + bad)
    for _ in range(2):  # everything is delivered three times
        assert await bus.publish(events) == [None] * len(events)

    async def all_consumed():
        return not any([await bus.lag(group) for group in (*EFFECTS, "naive")])

    await until(all_consumed, 60, what="every group is through")
    assert await count(shop, notifications) == len(good + bad)
    for group in ("payouts", "analytics", "feed"):
        assert await count(shop, EFFECTS[group]) == len(good), group
    for table in EFFECTS.values():
        async with read(shop) as tx:
            assert len(set(await tx.scalars(select(table.c.order_id)))) == await count(shop, table)
    assert sum(seen.values()) >= 3 * len(good), "the duplicates did arrive: without an inbox each counts"

    relays[1].terminate()
    assert await relays[1].exited(20) == 0
    stop.set()
    await naive
    await bus.close()


async def test_events_that_the_bus_lost_are_found_and_handed_to_their_consumer_once(shop, own_redis):
    bus = RedisStreamsBus(producer_client(own_redis.url))
    sold = {
        "pack_id": "biology-101",
        "pack_title": "Biology 101",
        "author": "bob",
        "customer": "ann",
        "seats": 1,
        "amount_cents": 1900,
    }

    async def publish(*names):
        facts = [
            Event(id=name, source="t", type="order.confirmed.v1", subject=name, data={**sold, "order_id": name})
            for name in names
        ]
        async with begin(shop) as tx:
            await add(tx, *facts)
        await Relay(shop, bus).run_once()

    async def consume_all():
        stop = asyncio.Event()
        task = asyncio.create_task(event_worker.consume(shop, bus, "feed", stop=stop))

        async def through():
            return await bus.lag("feed") == 0

        await until(through, 20, "the feed is through")
        stop.set()
        await task

    await bus.subscribe("feed", [TOPIC])
    await publish("a", "b", "c")
    await consume_all()
    await publish("d", "e")
    assert await event_worker.reconcile_events(shop, bus, "feed", grace=0) is None, "not read yet is not lost"
    with own_redis.client() as server:
        server.flushall()
    await bus.subscribe("feed", [TOPIC])
    await consume_all()
    assert await count(shop, feed_entries) == 3, "nobody told the feed what it missed"
    report = await event_worker.reconcile_events(shop, bus, "feed", grace=0)
    assert report is not None
    assert report.repaired == ["d", "e"]
    assert await count(shop, feed_entries) == 5
    again = await event_worker.reconcile_events(shop, bus, "feed", grace=0)
    assert again is not None
    assert (again.checked, again.clean) == (5, True)
    young = await event_worker.reconcile_events(shop, bus, "payouts")
    assert young is not None
    assert (young.young, young.repaired) == (5, []), "what was published just now is on its way"
    await bus.redis.aclose()


async def _end_leases(store, pid):
    """Let the time pass for which a dead process still holds its work: half a minute in production."""
    async with begin(store) as tx:
        held = saga_store.sagas.update().where(saga_store.sagas.c.owner.contains(f":{pid}:"))
        await tx.execute(held.values(due_at=0.0))
        claimed = outbox.update().where(outbox.c.claimed_by.contains(f"-{pid}-"), outbox.c.published_at.is_(None))
        await tx.execute(claimed.values(due_at=0.0))


async def _confirmed(store, number):
    return len(await service.list_orders(store, status="confirmed")) >= number

# [fanout]
from bullmq import Queue

from patterns.connections import producer_client
from patterns.fan_out import FanOut

routes = FanOut({"order.placed": ["notifications", "payouts", "analytics"]})


async def publish(tx, event) -> None:
    await routes.add(tx, event)  # in the transaction of the order: all queues or none


def relays(engine, url) -> list:
    redis = producer_client(url)
    return routes.relays(engine, lambda name: Queue(name, {"connection": redis}))  # run each as a task


# [/fanout]
# [ordering]
from patterns.ordering import KeyedLanes, partition_of


def in_order(handle, lanes: KeyedLanes):
    """A handler for any bus: one process sees all events of a key, partition_of(event.subject, processes)."""

    async def handler(event) -> None:
        future = await lanes.submit(event.subject, event.id, lambda: handle(event))
        # The bus acknowledges what returns, so await the outcome. What raises is delivered again: OutOfTurn, while
        # an earlier event of the key has to come back first, consumes no attempt.
        await future

    return handler


async def consume_in_order(bus, handle, stop) -> None:
    await bus.consume("stock", ["order"], in_order(handle, KeyedLanes(concurrency=16)), stop=stop)


# [/ordering]
# [replay]
from datetime import UTC, datetime, timedelta

from patterns.replay import logged, replay


async def replay_last_day(engine, effect) -> dict:
    """Give consumer "revenue" what it missed since yesterday; what it had is skipped, nobody else notices."""
    events = logged(engine, since=datetime.now(UTC) - timedelta(days=1))
    done = await replay(engine, "revenue", events, effect)
    return {"applied": done.applied, "skipped": done.skipped, "failed": done.failed}


# [/replay]
# [reconcile]
from sqlalchemy import text

from patterns.job_ids import job_id
from patterns.producer import JobRequest, Producer
from patterns.reconciliation import Expected, Reconciled, reconcile
from patterns.store import read


async def orders_without_job(engine, producer: Producer) -> Reconciled:
    async def expected():
        async with read(engine) as tx:
            for row in await tx.execute(text("SELECT id, placed_at FROM orders WHERE paid = 0")):
                yield Expected(row.id, row.placed_at)

    async def present(keys):  # those that have their job; a done one has its marker or result row
        queue = producer.queue("payments")
        return [key for key in keys if await queue.getJob(job_id("charge", key))]

    async def repair(key: str) -> None:
        await producer.enqueue(JobRequest("charge", {"order_id": key}, key=key))  # same id: safe to repeat

    return await reconcile(expected(), present, repair, grace=300)  # alert when not report.clean


# [/reconcile]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from patterns import outbox, store
    from patterns.bus_redis_streams import RedisStreamsBus
    from patterns.outbox_relay import Relay
    from patterns.typed_jobs import JobTypes, Payload
    from shop import OrderPlaced, types

    engine = store.open_store(store_url)
    await store.create_all(engine)
    event = types.new(OrderPlaced(order_id="o1", cents=5), subject="o1", source="shop", id="o1.placed")
    async with store.begin(engine) as tx:
        await publish(tx, event)
        await publish(tx, event)
        await outbox.add(tx, event)
        await tx.execute(text("CREATE TABLE orders (id TEXT, placed_at REAL, paid INTEGER)"))
        await tx.execute(text("INSERT INTO orders VALUES ('o1', 1, 0)"))
    for relay in relays(engine, redis_url):
        assert await relay.run_once() == 1
    redis = producer_client(redis_url)
    for queue in routes.queues:
        assert (
            sum((await Queue(queue, {"connection": redis}).getJobCounts("waiting", "prioritized")).values())
            == 1
        )

    class Sink:
        async def publish(self, events):
            return [None for _ in events]

    await Relay(engine, Sink()).run_once()
    applied = []

    async def effect(tx, event) -> None:
        applied.append(event.id)

    assert (await replay_last_day(engine, effect))["applied"] == 1
    assert (await replay_last_day(engine, effect))["skipped"] == 1
    assert applied == ["o1.placed"]

    bus = RedisStreamsBus(producer_client(redis_url))  # unordered: the lanes alone keep the order
    await bus.subscribe("stock", ["order"])
    placed = [OrderPlaced(order_id=f"k{number % 2}", cents=number) for number in range(20)]
    events = [
        types.new(order, subject=order.order_id, source="shop", id=f"m{order.cents}") for order in placed
    ]
    assert await bus.publish(events) == [None] * 20
    handled, broken, stop = [], {"m4", "m7"}, asyncio.Event()

    async def handle(event) -> None:
        if event.id in broken:
            broken.discard(event.id)
            raise RuntimeError("fails once, so its successors have to wait for it")
        handled.append(event.id)
        if len(handled) == 20:
            stop.set()

    await consume_in_order(bus, handle, stop)
    for key in range(2):
        assert [one for one in handled if int(one[1:]) % 2 == key] == [f"m{n}" for n in range(key, 20, 2)]
    assert await bus.lag("stock") == 0, "every event is acknowledged"
    await bus.redis.aclose()
    assert partition_of("k1", 4) == partition_of("k1", 4)

    class Charge(Payload):
        order_id: str

    async def charge(ctx, payload) -> None: ...

    jobs = JobTypes()
    jobs.register(name="charge", payload=Charge, handler=charge, queue="payments")
    producer = Producer(jobs, redis_url)
    assert (await orders_without_job(engine, producer)).repaired == ["o1"]
    assert (await orders_without_job(engine, producer)).repaired == []
    await producer.close()
    await redis.aclose()
    await store.close(engine)

# [fanout]
from bullmq import Queue

from patterns.bullmq_worker import ReliableWorker
from patterns.core.connections import producer_client
from patterns.fan_out import FanOut, deliver
from patterns.outbox.relay import Relay

routes = FanOut({"order.placed": ["notifications", "payouts", "analytics"]})


async def publish(tx, event) -> None:
    await routes.add(tx, event)  # in the transaction of the order: all queues or none


def relays(store, url) -> list:
    redis = producer_client(url)
    publishers = routes.publishers(lambda name: Queue(name, {"connection": redis}))
    return [Relay(store, each, destination=to) for to, each in publishers.items()]  # run each as a task


def worker(url, queue: str, handle) -> ReliableWorker:
    """The consumer's side: `await handle(event)` until it returns; `Permanent` fails the job, for people to retry."""
    return ReliableWorker(queue, deliver(handle), url=url)


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


async def replay_last_day(store, effect) -> dict:
    """Give consumer "revenue" what it missed since yesterday; what it had is skipped, nobody else notices."""
    events = logged(store, since=datetime.now(UTC) - timedelta(days=1))
    done = await replay(store, "revenue", events, effect)
    return {"applied": done.applied, "skipped": done.skipped, "failed": done.failed}


# [/replay]
# [reconcile]
from sqlalchemy import text

from patterns.core.store import read
from patterns.job_ids import job_id
from patterns.producer import JobRequest, Producer
from patterns.reconciliation import Expected, Reconciled, reconcile


async def orders_without_job(store, producer: Producer) -> Reconciled:
    async def expected():
        async with read(store) as tx:
            for row in await tx.execute(text("SELECT id, placed_at FROM orders WHERE paid = 0")):
                yield Expected(row.id, row.placed_at)

    async def present(keys):  # those that have their job; a done one has its marker or result row
        queue = producer.queue("payments")
        return [key for key in keys if await queue.getJob(job_id("charge", key))]

    async def repair(key: str) -> None:
        # The same id: safe to repeat.
        await producer.enqueue(JobRequest("charge", {"order_id": key}, key=key, queue="payments"))

    return await reconcile(expected(), present, repair, grace=300)  # alert when not report.clean


# [/reconcile]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from patterns import outbox
    from patterns.core.open_store import close, create_all, open_store
    from patterns.core.store import begin
    from patterns.event_bus.redis_streams import RedisStreamsBus
    from patterns.outbox.relay import Relay
    from shop import OrderPlaced, types

    store = open_store(store_url)
    await create_all(store)
    event = types.new(OrderPlaced(order_id="o1", cents=5), subject="o1", source="shop", id="o1.placed")
    async with begin(store) as tx:
        await publish(tx, event)
        await publish(tx, event)
        await outbox.add(tx, event)
        await tx.execute(text("CREATE TABLE orders (id TEXT, placed_at REAL, paid INTEGER)"))
        await tx.execute(text("INSERT INTO orders VALUES ('o1', 1, 0)"))
    for relay in relays(store, redis_url):
        assert await relay.run_once() == 1
    redis = producer_client(redis_url)
    for queue in routes.queues:
        assert sum((await Queue(queue, {"connection": redis}).getJobCounts("waiting", "prioritized")).values()) == 1
    taken = []

    async def take(event) -> None:
        taken.append(event.id)

    consuming = worker(redis_url, "payouts", take)
    task = asyncio.create_task(consuming.run())
    async with asyncio.timeout(20):
        while not taken:
            await asyncio.sleep(0.02)
    await consuming.drain(5)
    await task
    assert taken == ["o1.placed"]

    class Sink:
        async def publish(self, events):
            return [None for _ in events]

    await Relay(store, Sink()).run_once()
    applied = []

    async def effect(tx, event) -> None:
        applied.append(event.id)

    assert (await replay_last_day(store, effect))["applied"] == 1
    assert (await replay_last_day(store, effect))["skipped"] == 1
    assert applied == ["o1.placed"]

    bus = RedisStreamsBus(producer_client(redis_url))  # unordered: the lanes alone keep the order
    await bus.subscribe("stock", ["order"])
    placed = [OrderPlaced(order_id=f"k{number % 2}", cents=number) for number in range(20)]
    events = [types.new(order, subject=order.order_id, source="shop", id=f"m{order.cents}") for order in placed]
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
        assert [name for name in handled if int(name[1:]) % 2 == key] == [f"m{n}" for n in range(key, 20, 2)]
    assert await bus.lag("stock") == 0, "every event is acknowledged"
    await bus.redis.aclose()
    assert partition_of("k1", 4) == partition_of("k1", 4)

    producer = Producer(redis_url)
    assert (await orders_without_job(store, producer)).repaired == ["o1"]
    assert (await orders_without_job(store, producer)).repaired == []
    await producer.close()
    await redis.aclose()
    await close(store)

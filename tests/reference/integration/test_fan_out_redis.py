"""One order, four queues, one of them down: exactly one job per queue in the end."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from bullmq import Queue, Worker
from sqlalchemy import Column, String, Table, select
from sqlalchemy.dialects import postgresql, sqlite

from harness.waiting import until
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.event import Event, UnknownEventType
from studyhall.patterns.core.store import begin, is_postgres, metadata, read
from studyhall.patterns.core.worker_connections import blocking_client
from studyhall.patterns.fan_out import FanOut, QueuePublisher, deliver, destination_of, event_job
from studyhall.patterns.outbox.quarantine import lag
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.retry import forever

QUEUES = ("notifications", "payouts", "feed", "analytics")
orders = Table("proof_orders", metadata, Column("id", String, primary_key=True))


class Queues:
    """Three queues on one server; `analytics` on another, which the test takes down."""

    def __init__(self, shared, other):
        self._clients = {name: producer_client(other if name == "analytics" else shared) for name in QUEUES}
        self._open = {name: Queue(name, {"connection": client}) for name, client in self._clients.items()}

    def __call__(self, name):
        return self._open[name]

    async def jobs(self, name):
        return int(await self._open[name].getJobCountByTypes("waiting", "active", "completed", "delayed"))

    async def counts(self):
        return {name: await self.jobs(name) for name in QUEUES}

    async def close(self):
        for client in self._clients.values():
            await client.aclose()


@pytest.fixture
async def queues(redis_url, own_redis):
    opened = Queues(redis_url, own_redis.url)
    yield opened
    await opened.close()


def relays(fan_out, store, queues):
    return [
        Relay(store, publisher, destination=destination, poll=0.1)
        for destination, publisher in fan_out.publishers(queues).items()
    ]


@asynccontextmanager
async def relaying(relays):
    tasks = [asyncio.create_task(relay.run()) for relay in relays]
    try:
        yield
    finally:
        for relay in relays:
            relay.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), 15)


def placed(order):
    """The id comes from the order: a caller that retries makes the same event again."""
    return Event(id=f"placed-{order}", source="/shop", type="order.placed.v1", subject=order, data={"order": order})


class AnswerLost(Exception):
    pass


async def test_one_queue_down_and_three_tries_end_with_one_job_in_each_queue(store, queues, own_redis, figures):
    fan_out = FanOut({"order.placed": QUEUES})
    own_redis.kill()

    async def naive_order(order):
        await asyncio.gather(*(queues(name).add("order.placed", {"order": order}, {}) for name in QUEUES))

    async def order_once(order, attempt):
        insert = (postgresql if is_postgres(store) else sqlite).insert(orders)
        async with begin(store) as tx:
            await tx.execute(insert.values(id=order).on_conflict_do_nothing())
            await fan_out.add(tx, placed(order))
        if attempt < 3:
            raise AnswerLost  # committed, but the caller never learns

    for _ in range(3):  # what every HTTP client does
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the driver raises for a dead server
            await naive_order("n-1")

    async def naive_landed():  # gather raises at once; what it had started goes on
        return [await queues.jobs(name) for name in QUEUES[:3]] == [3, 3, 3]

    await until(naive_landed, 10, "the naive adds that were still on their way")
    own_redis.restart()
    naive = await queues.counts()  # the queue is back, and nobody ever brings its job
    own_redis.kill()
    assert naive == {"notifications": 3, "payouts": 3, "feed": 3, "analytics": 0}
    for name in QUEUES[:3]:
        await queues(name).obliterate(force=True)
    async with relaying(relays(fan_out, store, queues)):
        tries = 0
        for attempt in (1, 2, 3):
            tries += 1
            try:
                await order_once("o-1", attempt)
            except AnswerLost:
                continue

        async def others():
            return [await queues.jobs(name) for name in QUEUES[:3]] == [1, 1, 1]

        await until(others, 15, "one job in each queue that is up")
        assert (await lag(store, destination=destination_of("analytics"))).waiting == 1
        own_redis.restart()

        async def all_there():
            return await queues.counts() == dict.fromkeys(QUEUES, 1)

        await until(all_there, 20, "the job in the queue that was down")
    jobs = await queues.counts()
    job = await queues("analytics").getJobs(["waiting"])
    assert [(j.id, j.data["data"]) for j in job] == [("analytics.placed-o-1", {"order": "o-1"})]
    figures(
        "fan-out",
        name=f"queue-down-{store.dialect.name}",
        queues=len(jobs),
        caller_tries=tries,
        jobs_per_queue=max(jobs.values()),
        naive_payouts=naive["payouts"],
        naive_analytics=naive["analytics"],
    )


async def test_a_rolled_back_order_reaches_no_queue(store, queues):
    fan_out = FanOut({"order.placed": QUEUES})

    async def fails():
        async with begin(store) as tx:
            await fan_out.add(tx, placed("o-1"))
            raise AnswerLost

    with pytest.raises(AnswerLost):
        await fails()
    for relay in relays(fan_out, store, queues):
        assert await relay.run_once() == 0
    assert await queues.counts() == dict.fromkeys(QUEUES, 0)


async def test_a_queue_that_does_not_answer_does_not_delay_the_others(store, queues, own_redis, figures):
    fan_out = FanOut({"order.placed": QUEUES})
    own_redis.pause()
    orders, slowest = 5, 0.0
    try:
        async with relaying(relays(fan_out, store, queues)):
            for n in range(orders):
                async with begin(store) as tx:
                    await fan_out.add(tx, placed(f"o-{n}"))
                begun = time.perf_counter()

                async def others(n=n):
                    return [await queues.jobs(name) for name in QUEUES[:3]] == [n + 1] * 3

                await until(others, 10, "the jobs in the other queues")
                slowest = max(slowest, time.perf_counter() - begun)
            assert (await lag(store, destination=destination_of("analytics"))).waiting == orders
            own_redis.resume()

            async def caught_up():
                return await queues.jobs("analytics") == orders

            await until(caught_up, 20, "the frozen queue to catch up")
    finally:
        own_redis.resume()
    name = f"frozen-queue-{store.dialect.name}"
    figures("fan-out", name=name, orders=orders, others_slowest_ms=round(slowest * 1000))


async def test_a_slow_consumer_does_not_delay_the_others(store, queues, redis_url):
    fan_out = FanOut({"order.placed": ("payouts", "feed")})
    done = []
    gate = asyncio.Event()

    async def slow(job, token):
        await gate.wait()

    async def quick(job, token):
        done.append(job.data["subject"])

    workers = [
        Worker(name, handler, {"connection": blocking_client(redis_url)})
        for name, handler in (("payouts", slow), ("feed", quick))
    ]
    try:
        async with relaying(relays(fan_out, store, queues)):
            for n in range(5):
                async with begin(store) as tx:
                    await fan_out.add(tx, placed(f"o-{n}"))
            await until(lambda: len(done) == 5, 15, "the quick consumer, while the slow one hangs on its first job")
    finally:
        gate.set()
        for worker in workers:
            await worker.close(force=True)


async def test_a_repeated_delivery_is_the_same_job(store, queues):
    """As after a relay that died between adding the job and marking the row."""
    publisher = QueuePublisher(queues("payouts"))
    for _ in range(3):
        assert await publisher.publish([placed("o-1"), placed("o-2")]) == [None, None]
    assert await queues.jobs("payouts") == 2


@asynccontextmanager
async def delivering(queue, handle, redis_url):
    worker = ReliableWorker(queue, deliver(handle, replace(forever(), scale=0)), url=redis_url)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        await worker.drain(5)
        await asyncio.wait_for(task, 10)


async def test_a_receiver_that_is_away_for_long_is_not_given_up_and_a_refusal_is_set_aside(queues, redis_url):
    """The job's own five attempts ended after 15 s; those of the consumer's policy do not."""
    taken = []
    refusals = [ConnectionError("away")] * 30

    async def post(event):
        if event.subject == "odd":
            raise Permanent("HTTP 422: unknown customer ann@example.com")
        if refusals:
            raise refusals.pop()
        taken.append(event.data["order"])

    publisher = QueuePublisher(queues("payouts"))
    await publisher.publish([placed("o-1"), placed("odd")])
    await queues("payouts").add("order.placed", {"no": "event"}, {"jobId": "foreign"})
    async with delivering("payouts", post, redis_url):
        await until(lambda: taken == ["o-1"], 20, "the receiver takes it after 30 failures")

        async def set_aside():
            return await queues("payouts").getFailedCount() == 2

        await until(set_aside, 10, "what is refused for good")
    failed = {job.id: job.failedReason for job in await queues("payouts").getFailed()}
    assert "HTTP 422" in failed["payouts.placed-odd"]
    assert "ann@" not in failed["payouts.placed-odd"]
    assert "not a CloudEvents" in failed["foreign"]


async def test_an_event_added_again_whose_job_failed_is_not_passed_over_in_silence(queues, redis_url, caplog):
    async def refuse(event):
        raise Permanent("HTTP 410")

    publisher = QueuePublisher(queues("payouts"))
    await publisher.publish([placed("o-1")])
    assert caplog.text == "", "a new event is nothing to report"
    async with delivering("payouts", refuse, redis_url):

        async def failed():
            return await queues("payouts").getFailedCount() == 1

        await until(failed, 10, "the job to fail")
    assert await publisher.publish([placed("o-1"), placed("o-2")]) == [None, None]
    assert "payouts.placed-o-1 failed before, nothing was added: retry the job" in caplog.text
    assert "o-2" not in caplog.text
    [job] = await queues("payouts").getFailed()
    await job.retry("failed")
    taken = []

    async def take(event):
        taken.append(event.id)

    async with delivering("payouts", take, redis_url):
        await until(lambda: sorted(taken) == ["placed-o-1", "placed-o-2"], 10, "the retried job and the new one")


async def test_every_queue_gets_the_job_in_the_shape_that_its_worker_expects(store, queues):
    def as_old_workers_read_it(queue, event):
        job = event_job(queue, event)
        return {**job, "name": "notify", "data": {"order_no": event.subject}}

    fan_out = FanOut({"order.placed": ("payouts", "feed")})
    async with begin(store) as tx:
        await fan_out.add(tx, placed("o-1"))
    for to, publisher in fan_out.publishers(queues, as_old_workers_read_it).items():
        assert await Relay(store, publisher, destination=to).run_once() == 1
    for name in ("payouts", "feed"):
        [job] = await queues(name).getJobs(["waiting"])
        assert (job.name, job.data, job.id) == ("notify", {"order_no": "o-1"}, f"{name}.placed-o-1")


async def test_an_event_without_route_is_refused_before_the_commit(store):
    lost = placed("o-1").model_copy(update={"type": "order.lost.v1"})

    async def place():
        async with begin(store) as tx:
            await tx.execute(orders.insert().values(id="o-1"))
            await FanOut({"order.placed": QUEUES}).add(tx, lost)

    with pytest.raises(UnknownEventType, match="add a route"):
        await place()
    async with read(store) as connection:
        assert (await connection.execute(select(orders))).all() == []

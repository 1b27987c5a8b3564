"""Redis never up, killed and frozen: callers get an answer in time, and every accepted order is one job."""

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest
from bullmq import Queue
from sqlalchemy import func, select

from harness.pipelines import full_pipeline, full_producer
from harness.waiting import until
from harness.workers import at_work, queue_at
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Overloaded, QueueUnavailable
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.degraded import DegradedProducer
from studyhall.patterns.degraded import pending as pending_jobs
from studyhall.patterns.degraded.pending import Drainer, drain, pending, release
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, MalformedPayload, UnknownJob

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))

import pending_orders as shop  # noqa: E402

pytestmark = pytest.mark.fault
IN_TIME = 2.0


@pytest.fixture
async def orders(store_url):
    store = open_store(store_url)
    await create_all(store)
    yield store
    await close(store)


@contextlib.asynccontextmanager
async def producer_at(url):
    producer = full_producer(shop.job_types(), url)
    try:
        yield producer
    finally:
        await producer.close()


async def timed(call):
    began = time.monotonic()
    try:
        answer = await call
    except QueueUnavailable as error:
        answer = error
    return time.monotonic() - began, answer


async def jobs_at(url):
    """Ids of the jobs that are or were in the queue."""
    async with queue_at(url, shop.QUEUE) as queue:
        counts = await queue.getJobs(["waiting", "prioritized", "delayed", "active", "completed"], 0, -1)
        return sorted(job.id for job in counts)


async def preparations(store):
    async with read(store) as connection:
        c = shop.prepared.c
        rows = await connection.execute(select(c.order_id, func.count()).group_by(c.order_id))
        return {row[0]: row[1] for row in rows}


@pytest.mark.slow
async def test_every_outage_is_answered_in_time_and_recovered_from_without_a_restart(own_redis, tmp_path, figures):
    """Cold start, kill and freeze; the same producers from beginning to end. The stock `add` just hangs."""
    store = open_store(f"sqlite:///{tmp_path / 'orders.db'}")
    await create_all(store)
    own_redis.kill()  # the port is known, and nobody listens
    stock = Queue("stock", {"connection": own_redis.url})
    hanging = asyncio.create_task(stock.add("order", {}, {}))
    slowest = {"error": 0.0, "accepted": 0.0}
    accepted = []
    recovered = []
    async with producer_at(own_redis.url) as plain, producer_at(own_redis.url) as wrapped:
        degraded = DegradedProducer(wrapped, store, retry_every=0.5)
        for outage in ("cold", "killed", "frozen"):
            if outage == "killed":
                own_redis.kill()
            elif outage == "frozen":
                own_redis.pause()
            spent, error = await timed(plain.enqueue(shop.prepare(f"plain-{outage}")))
            assert isinstance(error, QueueUnavailable)
            assert "try again with the same key" in str(error)
            slowest["error"] = max(slowest["error"], spent)
            for number in range(3):
                spent, answer = await timed(degraded.enqueue(shop.prepare(f"{outage}-{number}")))
                slowest["accepted"] = max(slowest["accepted"], spent)
                assert not answer.queued
                accepted.append(answer.ref.id)
            if outage == "cold":
                done, _ = await asyncio.wait({hanging}, timeout=IN_TIME + 1)
                assert not done, "the stock add does not hang any more: the comparison is out of date"
            if outage == "frozen":
                own_redis.resume()
            else:
                own_redis.restart()
            back = time.monotonic()

            async def all_queued():
                await drain(store, wrapped)
                return (await pending(store)).waiting == 0

            await until(all_queued, 20, f"the orders of the {outage} server to be queued")
            recovered.append(time.monotonic() - back)
            await plain.enqueue(shop.prepare(f"plain-{outage}"))

            async def as_before(key=f"after-{outage}"):
                return (await degraded.enqueue(shop.prepare(key))).queued

            await until(as_before, 10, "the degraded producer to try Redis again")
    queued = await jobs_at(own_redis.url)
    hanging.cancel()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await asyncio.wait_for(stock.close(), 3)
    await close(store)
    figures(
        "degraded",
        name="outages",
        outages=len(recovered),
        slowest_error_seconds=round(slowest["error"], 2),
        slowest_acceptance_seconds=round(slowest["accepted"], 2),
        slowest_recovery_seconds=round(max(recovered), 2),
        stock_add="ends" if done else "hangs",
    )
    assert slowest["error"] < IN_TIME
    assert slowest["accepted"] < IN_TIME
    for ident in accepted:
        assert queued.count(ident) == 1


async def test_an_order_sent_three_times_to_a_frozen_server_is_prepared_once(own_redis, orders, figures):
    """The adds time out but still land when Redis thaws. Without an id that makes three orders."""
    naive_client = producer_client(own_redis.url)
    naive = Queue("naive", {"connection": naive_client})
    # Several open connections, as a server under load has them: a fresh one would hang before it sends the add.
    await asyncio.gather(*(naive.add("warm-up", {}, {}) for _ in range(4)))
    async with producer_at(own_redis.url) as producer:
        degraded = DegradedProducer(producer, orders, retry_every=0)
        await asyncio.gather(*(producer.enqueue(shop.prepare(f"warm-up-{n}")) for n in range(4)))
        own_redis.pause()
        naive_adds, our_adds = [], []
        for _ in range(3):  # a client that gets no answer in time sends it again
            naive_adds.append(asyncio.create_task(naive.add("order", {"order_id": "o-1"}, {})))
            our_adds.append(asyncio.create_task(degraded.enqueue(shop.prepare("o-1"))))
            await asyncio.sleep(0.2)
        answers = await asyncio.gather(*naive_adds, return_exceptions=True)
        assert all(isinstance(answer, Exception) for answer in answers)
        assert not any(answer.queued for answer in await asyncio.gather(*our_adds))
        assert (await pending(orders)).waiting == 1
        own_redis.resume()
        async with queue_at(own_redis.url, "naive") as queue:
            await until(lambda: _at_least(queue, 4 + 1), 10, "the timed-out adds to land")
            await queue.add("last", {}, {})  # behind everything that was sent before
            naive_jobs = len(await queue.getJobs(["waiting"], 0, -1)) - 4 - 1
        landed = await jobs_at(own_redis.url)
        assert "prepare-order.o-1" in landed, "no timed-out add landed: the fault did not happen"
        async with at_work(shop.QUEUE, full_pipeline(shop.job_types(), orders), url=own_redis.url):
            await until(lambda: _prepared(orders, "o-1"), 10, "the order to be prepared")
            drained = await drain(orders, producer)  # late: its job is done already
            await producer.enqueue(shop.prepare("last"))
            await until(lambda: _prepared(orders, "last"), 10, "the queue to be empty")
        made = await preparations(orders)
    await naive_client.aclose()
    figures(
        "degraded",
        name="frozen",
        sent=len(our_adds),
        jobs=landed.count("prepare-order.o-1"),
        prepared=made["o-1"],
        naive_jobs=naive_jobs,
    )
    assert drained.queued == 1
    assert made["o-1"] == 1
    assert naive_jobs == 3, "the naive adds made one order: nothing is proven"


async def _at_least(queue, count):
    return len(await queue.getJobs(["waiting"], 0, -1)) >= count


async def _prepared(store, order_id):
    return order_id in await preparations(store)


@pytest.mark.slow
async def test_crash_between_commit_and_queue_loses_no_job(redis_url, store_url, orders, spawn):
    for kind in ("ours", "naive"):
        args = [f"--redis={redis_url}", f"--store={store_url}", f"--order={kind}"]
        taker = spawn(PROGRAMS / "order_taker.py", *args, *(["--naive"] if kind == "naive" else []))
        assert await taker.exited(60) == -9, str(taker)
    async with read(orders) as connection:
        committed = set((await connection.execute(select(shop.orders.c.id))).scalars())
    assert committed == {"ours", "naive"}
    assert await jobs_at(redis_url) == [], "it was queued before the crash: the fault did not happen"
    async with producer_at(redis_url) as producer:
        drainer = Drainer(orders, producer, every=0.1)
        running = asyncio.create_task(drainer.run())
        await until(lambda: jobs_at(redis_url), 20, "the drainer to queue the order")
        await drainer.drain(0)
        await running
    assert await jobs_at(redis_url) == ["prepare-order.ours"], "the naive order has a row and no job, for good"


async def test_rolled_back_order_leaves_no_request(redis_url, orders):
    async with producer_at(redis_url) as producer:
        degraded = DegradedProducer(producer, orders)

        async def fails():
            async with begin(orders) as tx:
                await tx.execute(shop.orders.insert().values(id="o-1"))
                await degraded.accept(tx, shop.prepare("o-1"))
                raise RuntimeError("no stock")

        with pytest.raises(RuntimeError, match="no stock"):
            await fails()
        assert (await pending(orders)).waiting == 0


async def test_several_drainers_queue_every_request_once(redis_url, orders):
    async with producer_at(redis_url) as producer:
        async with begin(orders) as tx:
            for number in range(150):
                await pending_jobs.add(tx, producer, shop.prepare(f"o-{number}"), head_start=0)
        drained = await asyncio.gather(*(drain(orders, producer, batch=60) for _ in range(4)))
        assert sum(each.queued for each in drained) == 150
        assert (await pending(orders)).waiting == 0
        assert len(await jobs_at(redis_url)) == 150


async def test_rows_of_a_drainer_that_died_are_taken_over(redis_url, orders, monkeypatch):
    monkeypatch.setattr(pending_jobs, "LEASE", 0.3)
    async with producer_at(redis_url) as producer:
        async with begin(orders) as tx:
            await pending_jobs.add(tx, producer, shop.prepare("o-1"), head_start=0)
        assert len(await pending_jobs._claim(orders, "a drainer that dies now", 10)) == 1
        assert (await drain(orders, producer)).queued == 0, "its lease still runs"

        async def taken_over():
            return (await drain(orders, producer)).queued == 1

        await until(taken_over, 10, "the lease to end")


async def test_head_start_lets_the_accepting_process_hand_over_first(redis_url, orders):
    async with producer_at(redis_url) as producer:
        degraded, request = DegradedProducer(producer, orders), shop.prepare("o-1")
        await degraded.admit(request)
        async with begin(orders) as tx:
            await degraded.accept(tx, request)
        assert (await drain(orders, producer)).queued == 0
        assert (await degraded.hand_over(request)).queued
        assert (await pending(orders)).waiting == 0


async def test_what_can_never_be_queued_is_parked_with_its_reason_and_can_be_released(redis_url, orders):
    """A request of a job type that this process does not know, and one that the outage outlasted."""
    older = JobTypes()

    async def gone(_ctx, _payload):
        pass

    older.register(name="gone", payload=shop.PrepareOrder, handler=gone, queue="gone")
    former = full_producer(older, redis_url)
    async with producer_at(redis_url) as producer:
        async with begin(orders) as tx:
            lost = JobRequest("gone", {"order_id": "x"}, key="x")
            await pending_jobs.add(tx, former, lost, head_start=0)
            await pending_jobs.add(tx, producer, shop.prepare("stale", max_age=0.01), head_start=0)
            await pending_jobs.add(tx, producer, shop.prepare("good"), head_start=0)
        await asyncio.sleep(0.05)
        drained = await drain(orders, producer)
        assert (drained.queued, drained.parked) == (1, 2)
        state = await pending(orders)
        assert state.waiting == 0
        assert state.parked["gone.x"].startswith("UnknownJob")
        assert state.parked["prepare-order.stale"].startswith("Expired")
        assert await release(orders, "gone.x")
        assert not await release(orders, "no such id")
        assert (await drain(orders, former)).queued == 1
    await former.close()


async def test_invalid_requests_are_refused_with_and_without_redis(own_redis, orders):
    async with producer_at(own_redis.url) as producer:
        degraded = DegradedProducer(producer, orders, most=2)
        for kill in (False, True):
            if kill:
                own_redis.kill()
            with pytest.raises(MalformedPayload):
                await degraded.enqueue(JobRequest("prepare-order", {"nonsense": 1}, key="k"))
            with pytest.raises(UnknownJob):
                await degraded.admit(JobRequest("prepare", {}, key="k"))
        for number in range(2):
            await degraded.enqueue(shop.prepare(f"o-{number}"))
        for refused in (degraded.enqueue, degraded.admit):
            with pytest.raises(Overloaded, match="wait for the queue"):
                await refused(shop.prepare("one too many"))
        assert (await pending(orders)).waiting == 2


async def test_delay_counts_from_acceptance(redis_url, orders):
    async with producer_at(redis_url) as producer:
        async with begin(orders) as tx:
            await pending_jobs.add(tx, producer, shop.prepare("soon", delay=0.3), head_start=0)
            await pending_jobs.add(tx, producer, shop.prepare("later", delay=600), head_start=0)
        await asyncio.sleep(0.4)
        await drain(orders, producer)
        async with queue_at(redis_url, shop.QUEUE) as queue:
            delays = {
                job.id: job.opts.get("delay", 0) for job in await queue.getJobs(["prioritized", "delayed"], 0, -1)
            }
        assert delays["prepare-order.soon"] == 0
        assert 590_000 < delays["prepare-order.later"] < 600_000


async def test_a_stored_request_keeps_every_field(redis_url):
    """Priority, policy, trace and children survive the database; a field that is added later must too."""
    async with producer_at(redis_url) as producer:
        child = shop.prepare("child", on_failure="ignore", priority="low", meta={"traceparent": "00-a-b-01"})
        parent = shop.prepare("parent", delay=5.0, max_age=60.0, priority="high", children=[child])
        given = pending_jobs.checked(await producer.prepared(parent))
        stored = json.loads(json.dumps(pending_jobs._plain(given)))
        assert set(stored) == {field.name for field in dataclasses.fields(JobRequest)}
        assert pending_jobs._request(stored, 0.0) == given

"""Depth and age limits at the producer, on a real server; and work that is too old to be worth doing."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from harness.pipelines import full_pipeline, full_producer
from harness.waiting import until
from harness.workers import at_work
from studyhall.patterns import dead_letter
from studyhall.patterns.backpressure import Admission, Limits, max_age
from studyhall.patterns.core.errors import Overloaded, QueueUnavailable
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.observability.metrics import JobMetrics
from studyhall.patterns.pipeline import Pipeline
from studyhall.patterns.priority import Priority
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload, plain


class Work(Payload):
    number: int = 0


async def nothing(_ctx, _payload):
    pass


def job_types():
    jobs = JobTypes()
    jobs.register(name="work", payload=Work, handler=nothing, queue="work")
    jobs.register(name="other", payload=Work, handler=nothing, queue="other")
    return jobs


def request(number, name="work", **options):
    return JobRequest(name, {}, key=f"k-{number}", **options)


@asynccontextmanager
async def producer_at(url, limits, **options):
    producer = full_producer(job_types(), url)
    if limits is not None:
        producer.admission = Admission(producer.redis, limits, **options)
    try:
        yield producer
    finally:
        await producer.close()


async def depth(producer):
    counts = await producer.queue("work").getJobCounts()
    return sum(counts[state] for state in ("waiting", "prioritized", "delayed", "waiting-children"))


async def test_queue_stays_within_its_depth_however_many_ask(redis_url, scale, figures):
    """No worker runs. Without a limit every producer is let in, until Redis is full."""
    asked, limit = scale(2_000, 20_000), 500
    refused = []
    async with producer_at(redis_url, Limits(depth=limit)) as producer:
        await producer.redis.config_resetstat()

        async def ask(number):
            try:
                await producer.enqueue(request(number))
            except Overloaded as error:
                refused.append(error.retry_after)

        for start in range(0, asked, 25):
            await asyncio.gather(*(ask(number) for number in range(start, start + 25)))
        kept = await depth(producer)
        looks = int((await producer.redis.info("commandstats"))["cmdstat_evalsha"]["calls"])
    async with producer_at(redis_url, None) as naive:
        await naive.queue("work").obliterate(True)
        for start in range(0, asked, 500):
            await naive.enqueue_many([request(f"n-{number}") for number in range(start, start + 500)])
        naive_kept = await depth(naive)
    figures(
        "backpressure", name="depth", asked=asked, limit=limit, kept=kept, refused=len(refused), naive_kept=naive_kept
    )
    assert naive_kept == asked, "the naive queue did not grow: nothing is proven"
    assert kept == limit
    assert len(refused) == asked - limit
    assert all(5 <= seconds <= 10 for seconds in refused)
    assert max(refused) - min(refused) > 2, "refused callers are spread"
    assert looks < kept + 100, "it asked the server for every refusal"


async def test_several_producers_exceed_the_limit_by_at_most_one_look(redis_url):
    async with (
        producer_at(redis_url, Limits(depth=100), cache=0.2) as first,
        producer_at(redis_url, Limits(depth=100), cache=0.2) as second,
    ):
        deadline, number = time.monotonic() + 1.5, 0
        while time.monotonic() < deadline:
            for producer in (first, second):
                number += 1
                try:
                    await producer.enqueue(request(number))
                except Overloaded:
                    await asyncio.sleep(0.01)
        assert 100 <= await depth(first) <= 200


async def test_every_state_that_fills_redis_counts(redis_url):
    async with producer_at(redis_url, Limits(depth=6)) as producer:
        queue, admission = producer.queue("work"), producer.admission
        assert isinstance(admission, Admission)
        await queue.add("stock", {}, {})  # waiting: no priority
        await producer.enqueue(request(1))  # prioritized
        await producer.enqueue(request(2, delay=60))
        await producer.enqueue(request("flow", children=[request("child", name="other")]))
        load = await admission.load("work")
        assert load.states == {"waiting": 1, "paused": 0, "prioritized": 1, "delayed": 1, "children": 1}
        await queue.pause()
        assert (await admission.load("work")).depth == 4


async def test_flow_is_refused_as_a_whole_when_one_of_its_queues_is_full(redis_url):
    async with producer_at(redis_url, {"other": Limits(depth=1)}) as producer:
        await producer.enqueue(request("first", name="other"))
        with pytest.raises(Overloaded, match="other"):
            await producer.enqueue(request("flow", children=[request("child", name="other")]))
        assert await depth(producer) == 0
        await producer.enqueue(request("a queue without limits"))


async def test_late_work_closes_the_door_for_its_own_priority_and_below(redis_url):
    """The oldest job of all is found, also behind newer ones of a higher priority."""
    async with producer_at(redis_url, Limits(age=0.5), cache=0.05) as producer:
        await producer.enqueue(request("old", priority="normal"))
        await producer.enqueue(request("new", priority="high"))

        async def closed():
            try:
                await producer.enqueue(request("one", priority="normal"))
            except Overloaded as error:
                return "late" in str(error)
            return False

        await until(closed, 5, "the door to close", every=0.1)
        with pytest.raises(Overloaded):
            await producer.enqueue(request("low", priority="low"))
        await producer.enqueue(request("urgent", priority="critical"))
        admission = producer.admission
        assert isinstance(admission, Admission)
        load = await admission.load("work")
        assert load.oldest(Priority.CRITICAL) < load.oldest(Priority.NORMAL)


async def test_jobs_that_wait_on_purpose_are_not_late(redis_url, tmp_path):
    """Delayed until later, or sent back by a rate limit: not a sign of workers that cannot keep up."""
    async with producer_at(redis_url, None) as producer:
        admission = Admission(producer.redis, Limits())
        queue = producer.queue("work")
        added = time.time()
        await producer.enqueue(request("delayed", delay=1.0))
        await asyncio.sleep(1.3)
        ready = "local m = redis.call('ZRANGE', KEYS[1], 0, 0)[1] redis.call('ZREM', KEYS[1], m) \
                 redis.call('HSET', KEYS[3] .. m, 'delay', 0) redis.call('ZADD', KEYS[2], 4294967296000, m)"
        keys = [queue.toKey(name) for name in ("delayed", "prioritized", "")]
        await producer.redis.eval(ready, 3, *keys)
        waited = (await admission.load("work")).oldest()
        assert waited < time.time() - added - 0.95, "the second before it was due does not count"
        await producer.redis.hset(queue.toKey("work.k-delayed"), "ats", 1)
        assert (await admission.load("work")).oldest() == 0.0


@pytest.mark.fault
async def test_admission_without_redis_fails_as_fast_as_the_add_itself(own_redis):
    async with producer_at(own_redis.url, Limits()) as producer:
        await producer.enqueue(request(1))
        own_redis.pause()
        await asyncio.sleep(1.1)  # past the cache
        began = time.monotonic()
        async with producer_at(own_redis.url, None) as plain:
            with pytest.raises(QueueUnavailable):
                await plain.enqueue(request(2))
        asked = time.monotonic()
        with pytest.raises(QueueUnavailable):
            await producer.enqueue(request(2))
        assert time.monotonic() - asked < 1.5 * (asked - began), "it waited for the load, then for the add"
        own_redis.resume()
        await producer.enqueue(request(2))


async def test_expired_work_is_dropped_visibly_and_its_neighbours_run(redis_url, tmp_path, figures):
    """It waited longer than it was worth: not run, counted, in the dead letters with its reason."""
    ran = []

    async def note(ctx, _payload):
        ran.append(ctx.key)

    jobs = JobTypes()
    jobs.register(name="work", payload=Work, handler=note, queue="work")
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    await create_all(store)
    metrics = JobMetrics()
    async with producer_at(redis_url, None) as producer:
        added = [await producer.enqueue(request(number, max_age=0.3 if number % 2 else 600)) for number in range(20)]
        # Its age counts from when it is due.
        added.append(await producer.enqueue(request("delayed", delay=0.8, max_age=5)))
        await asyncio.sleep(0.6)
        async with at_work("work", full_pipeline(jobs, store, metrics=metrics), url=redis_url):
            await until(lambda: len(ran) >= 11, 10, "the others to run")
            await until(lambda: _failed(producer, 10), 10, "ten jobs to be dropped")
        await dead_letter.sweep(["work"], producer.redis, store)
        letters = await dead_letter.list_dead_letters(store)
    await close(store)
    reasons = {letter.reason.split(":")[0] for letter in letters}
    figures("backpressure", name="expired", jobs=len(added), ran=len(ran), dropped=len(letters))
    assert sorted(ran) == sorted(["k-delayed", *(f"k-{number}" for number in range(0, 20, 2))])
    assert len(letters) == 10
    assert reasons == {"Expired"}


async def test_a_job_of_another_producer_gets_the_age_that_the_step_names(redis_url):
    ran = []

    async def note(_ctx, payload):
        ran.append(payload.number)

    async with producer_at(redis_url, None) as producer:
        foreign, now = producer.queue("foreign"), time.time() * 1000
        await foreign.add("any", {"number": 1}, {"timestamp": round(now - 60_000)})
        await foreign.add("any", {"number": 2})
        async with at_work("foreign", Pipeline(plain(Work, note), max_age(30)), url=redis_url):
            await until(foreign.getFailedCount, 10, "the old one to be dropped")
            await until(lambda: ran, 10, "the new one to run")
        [expired] = await foreign.getFailed()
    assert "Expired" in expired.failedReason
    assert ran == [2]


async def test_a_worker_whose_clock_is_an_hour_ahead_drops_nothing_that_is_fresh(redis_url, tmp_path, monkeypatch):
    ran = []

    async def note(ctx, _payload):
        ran.append(ctx.key)

    jobs = JobTypes()
    jobs.register(name="work", payload=Work, handler=note, queue="work")
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    await create_all(store)
    async with producer_at(redis_url, None) as producer:
        await producer.enqueue(request("fresh", max_age=600))
        await producer.enqueue(request("stale", max_age=0.1))
        await asyncio.sleep(0.2)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        async with at_work("work", full_pipeline(jobs, store), url=redis_url):
            await until(lambda: _failed(producer, 1), 10, "the stale one to be dropped")
            await until(lambda: ran, 10, "the fresh one to run")
    await close(store)
    assert ran == ["k-fresh"]


async def _failed(producer, count):
    return int(await producer.queue("work").getFailedCount()) == count

"""Waiting for a job: at any gap between add and wait, through failures, cancellations and a forgetful Redis."""

import asyncio
import contextlib
from collections import Counter

import pytest
from bullmq import QueueEvents

from harness.pipelines import full_pipeline, full_producer
from harness.workers import at_work
from studyhall.patterns import dead_letter
from studyhall.patterns.cancel import cancel
from studyhall.patterns.core.errors import Cancelled, Permanent
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.worker_connections import events_client
from studyhall.patterns.dead_letter import reason_of
from studyhall.patterns.idempotency import Inbox, result_of
from studyhall.patterns.producer import JobRef, JobRequest
from studyhall.patterns.progress_stream import ProgressStream
from studyhall.patterns.typed_jobs import JobTypes, Payload
from studyhall.patterns.wait_for_result import JobFailed, JobUnknown, Results, StillRunning


class Work(Payload):
    number: int = 0
    seconds: float = 0.0
    fails: bool = False


async def work(_ctx, payload: Work):
    await asyncio.sleep(payload.seconds)
    if payload.fails:
        raise Permanent("no good")
    return {"number": payload.number}


def job_types():
    jobs = JobTypes()
    jobs.register(name="work", payload=Work, handler=work, queue="work")
    return jobs


class Bench:
    def __init__(self, url, directory):
        self.url = url
        self.jobs = job_types()
        self.store = open_store(f"sqlite:///{directory / 'results.db'}")
        self.producer = full_producer(self.jobs, url, timeout=10)
        self.stream = ProgressStream(url, self.jobs.queues)
        self.results = Results(
            self.stream, self.producer.redis, stored=result_of(self.store), failed=reason_of(self.store)
        )

    async def add(self, number, **fields):
        return await self.producer.enqueue(JobRequest("work", {"number": number, **fields}, key=f"k-{number}"))

    def worker(self):
        return at_work("work", full_pipeline(self.jobs, self.store), url=self.url, concurrency=20)

    @property
    def leaked(self):
        return len(self.stream._ending)


@contextlib.asynccontextmanager
async def bench_at(url, directory):
    bench = Bench(url, directory)
    await create_all(bench.store)
    reading = asyncio.create_task(bench.stream.run())
    try:
        await bench.stream.ready()
        yield bench
    finally:
        reading.cancel()
        await asyncio.wait({reading})
        await bench.producer.close()
        await close(bench.store)


@pytest.fixture
async def bench(redis_url, tmp_path):
    async with bench_at(redis_url, tmp_path) as made:
        yield made


async def naive_wait(url, job_id, seconds):
    """A listener attached after the add, as in most examples. True: it saw the end."""
    events = QueueEvents("work", {"connection": events_client(url), "autorun": False})
    seen = asyncio.Event()
    events.on("completed", lambda args, *_: seen.set() if args.get("jobId") == job_id else None)
    running = asyncio.create_task(events.run())
    try:
        async with asyncio.timeout(seconds):
            await seen.wait()
    except TimeoutError:
        return False
    finally:
        running.cancel()
        await asyncio.wait({running})
        await events.close()
    return True


async def test_every_wait_resolves_at_any_gap_and_a_late_listener_sees_nothing(bench, figures, scale):
    gaps = (0.0, 0.001, 0.02, 0.1, 0.3)
    resolved = 0
    async with bench.worker():

        async def wait(number):
            ref = await bench.add(number)
            await asyncio.sleep(gaps[number % len(gaps)])
            result = await bench.results.wait(ref, timeout=20)
            return result["number"]

        answers = await asyncio.gather(*(wait(number) for number in range(50)))
        resolved = sum(answer == number for number, answer in enumerate(answers))

        async def late(number):
            ref = await bench.add(number)
            await bench.results.wait(ref, timeout=20)  # it has ended: the gap is wide enough
            return await naive_wait(bench.url, ref.id, 0.5)

        tries = scale(10, 50)
        naive = sum(await asyncio.gather(*(late(1_000 + number) for number in range(tries))))
    assert resolved == 50
    assert naive == 0
    assert bench.leaked == 0
    waits = len(answers)
    figures("wait-for-result", name="gaps", waits=waits, resolved=resolved, naive_waits=tries, naive_resolved=naive)


async def test_failure_raises_also_after_the_sweep_took_the_job_away(bench):
    async with bench.worker():
        ref = await bench.add(1, fails=True)
        with pytest.raises(JobFailed, match="no good"):
            await bench.results.wait(ref, timeout=20)
        await dead_letter.sweep(["work"], bench.producer.redis, bench.store)
        assert not await bench.producer.redis.exists(f"bull:work:{ref.id}"), "it has left Redis"
        with pytest.raises(JobFailed, match="no good"):
            await bench.results.wait(ref, timeout=20)
    assert bench.leaked == 0


async def test_a_result_outlives_redis(bench):
    async with bench.worker():
        ref = await bench.add(7)
        await bench.results.wait(ref, timeout=20)
    await bench.producer.redis.flushall()
    assert await bench.results.wait(ref, timeout=5) == {"number": 7}
    with pytest.raises(JobUnknown):
        await bench.results.wait(JobRef("work", "work", "work.never", "never"), timeout=5)
    assert bench.leaked == 0


async def test_a_wait_ends_in_time_and_leaves_nothing_behind(bench):
    ref = await bench.add(1)  # no worker
    with pytest.raises(StillRunning):
        await bench.results.wait(ref, timeout=0.3)
    waits = [asyncio.create_task(bench.results.wait(ref, timeout=60)) for _ in range(105)]
    await asyncio.sleep(0.1)
    assert bench.leaked == 1, "they wait for one job"
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    assert bench.leaked == 0
    async with bench.worker():
        assert await bench.results.wait(ref, timeout=20) == {"number": 1}, "the job was not harmed"


async def test_a_wait_after_a_failed_task_group_is_a_wait_like_any_other(bench):
    """Python before 3.13 leaves the caller's task marked as cancelled: the wait raised CancelledError at once."""

    async def breaks():
        raise ValueError

    async def caller():
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(breaks())
        return await bench.results.wait(await bench.add(1), timeout=20)

    async with bench.worker():
        assert await asyncio.create_task(caller()) == {"number": 1}


async def test_a_cancelled_job_is_reported_as_cancelled(bench):
    ref = await bench.add(1)
    await cancel(bench.producer.redis, bench.store, ref.queue, ref.id, "changed my mind")
    async with bench.worker():
        with pytest.raises(Cancelled, match="changed my mind"):
            await bench.results.wait(ref, timeout=20)


@pytest.mark.fault
async def test_a_restart_of_redis_during_the_wait_is_waited_out(own_redis, tmp_path):
    async with bench_at(own_redis.url, tmp_path) as bench, bench.worker():
        refs = [await bench.add(number, seconds=1.5) for number in range(10)]
        waits = [asyncio.create_task(bench.results.wait(ref, timeout=60)) for ref in refs]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(own_redis.restart)
        assert [answer["number"] for answer in await asyncio.gather(*waits)] == list(range(10))
        assert bench.leaked == 0


@pytest.mark.slow
@pytest.mark.needs_postgres
async def test_two_thousand_waiters_survive_an_outage_of_the_database(redis_url, own_postgres):
    """Redis has forgotten the jobs, so every waiter asks the database, which is away, then back."""
    store = open_store(own_postgres.url)
    await create_all(store)
    producer = full_producer(job_types(), redis_url, timeout=10)
    stream = ProgressStream(redis_url, ["work"])
    results = Results(stream, producer.redis, stored=result_of(store), failed=reason_of(store))
    refs = [JobRef("work", "work", f"work.k-{n}", f"k-{n}") for n in range(2_000)]
    stored = Inbox(store, "work")
    await asyncio.gather(*(stored.record(ref.key, "f", {"number": n}) for n, ref in enumerate(refs)))
    await asyncio.to_thread(own_postgres.kill)
    impatient = await asyncio.gather(*(results.wait(ref, timeout=1.5) for ref in refs), return_exceptions=True)
    assert Counter(map(type, impatient)) == {StillRunning: 2_000}, "one clear error, and only for the time"
    waiting = [asyncio.create_task(results.wait(ref, timeout=60)) for ref in refs]
    await asyncio.wait(waiting, timeout=1.0)
    assert not any(task.done() for task in waiting)
    await asyncio.to_thread(own_postgres.restart)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert answers == [{"number": n} for n in range(2_000)]
    await producer.close()
    await close(store)

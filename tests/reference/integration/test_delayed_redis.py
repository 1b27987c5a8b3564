"""Delayed jobs: on time, movable, withdrawable; sleeping in a worker instead holds its slots."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from harness.pipelines import full_producer
from harness.waiting import until
from harness.workers import at_work, stock_at_work
from studyhall.patterns import delayed
from studyhall.patterns.core.errors import InvalidDelay
from studyhall.patterns.core.worker_connections import blocking_client
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload


async def nothing(ctx, payload: Payload): ...


@pytest.fixture
async def producer(redis_url):
    jobs = JobTypes()
    jobs.register(name="later", payload=Payload, handler=nothing, queue="q")
    made = full_producer(jobs, redis_url, timeout=10)
    yield made
    await made.close()


@pytest.mark.slow
async def test_delayed_jobs_start_on_time_where_the_stock_worker_is_late(redis_url, producer, scale, figures):
    jobs = scale(60, 500)

    oversleeping = []  # of the machine: what is late for another reason

    async def lateness(worker, **options):
        late = {}
        due = {}

        async def processor(job, token):
            late[job.id] = time.time() - due[job.id]

        async with worker("q", processor, **options):
            # All before the first is due: every add would wake the stock worker, which then looks around.
            refs = await producer.enqueue_many(
                [JobRequest("later", {}, key=f"{worker.__name__}-{n}", delay=2 + n * 3 / jobs) for n in range(jobs)]
            )
            scores = await producer.redis.zmscore("bull:q:delayed", [ref.id for ref in refs])
            due.update(zip([ref.id for ref in refs], [score // 0x1000 / 1000 for score in scores], strict=True))
            assert min(due[ref.id] for ref in refs) > time.time(), "the first was due before all were added"
            deadline = time.monotonic() + 30
            while len(late) < jobs and time.monotonic() < deadline:
                before = time.monotonic()
                await asyncio.sleep(0.02)
                oversleeping.append(time.monotonic() - before - 0.02)
        assert len(late) == jobs, "every delayed job ran"
        return sorted(late.values())

    ours = await lateness(at_work, url=redis_url)
    stock = await lateness(stock_at_work, connection=blocking_client(redis_url))
    p95, stock_p50 = ours[int(0.95 * jobs)], stock[jobs // 2]
    noise = sorted(oversleeping)[int(0.95 * len(oversleeping))]
    assert p95 <= 0.15 + noise, f"95 of 100 within 150 ms, got {p95:.3f} s"
    assert ours[0] > -0.05, "none starts early"
    assert stock_p50 > 2 * p95, "the stock worker was on time: this run proves nothing"
    figures(
        "delayed",
        name="lateness",
        jobs=jobs,
        p50_ms=round(1000 * ours[jobs // 2]),
        p95_ms=round(1000 * p95),
        stock_p50_ms=round(1000 * stock_p50),
        stock_p95_ms=round(1000 * stock[int(0.95 * jobs)]),
    )


@pytest.mark.parametrize("ahead", [3600, -3600])
async def test_a_worker_whose_clock_is_wrong_starts_a_delayed_job_on_time(redis_url, producer, monkeypatch, ahead):
    real, started = time.time, list[float]()

    async def processor(job, token):
        started.append(real())

    ref = await producer.enqueue(JobRequest("later", {}, key="skew", delay=1.0))
    due = await delayed.due_at(producer, ref)
    assert due is not None
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    async with at_work("q", processor, url=redis_url):
        await until(lambda: started, 20, "the delayed job")
    assert started[0] > due - 0.05, "it was started early"


async def test_waiting_in_the_queue_holds_no_slot_where_a_sleeping_job_holds_one(redis_url, producer, figures):
    started = {}

    async def processor(job, token):
        if job.name == "sleeper":  # the naive version of "in two seconds"
            await asyncio.sleep(2)
        started[job.id] = time.monotonic()

    async def wait_of_a_quick_job(naive):
        queue = producer.queue("q")
        for number in range(5):
            if naive:
                await queue.add("sleeper", {}, {"jobId": f"sleeper.{number}"})
            else:
                await producer.enqueue(JobRequest("later", {}, key=f"s{number}", delay=2))
        quick = f"quick.{naive}"
        async with at_work("q", processor, url=redis_url, concurrency=5):
            await asyncio.sleep(0.1)
            added = time.monotonic()
            await queue.add("quick", {}, {"jobId": quick})
            await until(lambda: quick in started, 10, "the quick job")
        return started[quick] - added

    ours = await wait_of_a_quick_job(naive=False)
    await producer.queue("q").obliterate(True)
    theirs = await wait_of_a_quick_job(naive=True)
    assert theirs > 1
    assert ours < theirs / 2
    figures("delayed", name="slots", quick_job_waited_ms=round(1000 * ours), naive_waited_ms=round(1000 * theirs))


async def test_a_rescheduled_job_starts_at_its_new_time_and_has_not_waited_since_the_old_one(redis_url, producer):
    ran = {}

    async def processor(job, token):
        ran[job.name + job.id] = time.time(), job

    async with at_work("q", processor, url=redis_url):
        sooner = await producer.enqueue(JobRequest("later", {}, key="sooner", delay=3600))
        later = await producer.enqueue(JobRequest("later", {}, key="later", delay=0.4))
        began = time.time()
        await delayed.reschedule(producer, sooner, 0.3)  # an idle worker must hear of it
        await delayed.reschedule(producer, later, 1.2)
        await until(lambda: len(ran) == 2, 10, "both ran")
    (at_sooner, _), (at_later, job) = ran["later" + sooner.id], ran["later" + later.id]
    assert at_sooner - began >= 0.29
    assert at_sooner < at_later, "the worker did not hear of it"
    assert at_later - began >= 1.19
    waited = time.time() - (job.timestamp + job.opts["delay"]) / 1000
    assert waited < time.time() - at_later + 0.5, "waiting time counts from the new due time"
    assert job.opts["attempts"] == 3
    assert job.opts["removeOnComplete"]["count"] == 1000


async def test_a_withdrawn_job_never_runs_and_its_key_is_free_again(redis_url, producer):
    ran = []

    async def processor(job, token):
        ran.append(job.id)

    ref = await producer.enqueue(JobRequest("later", {}, key="k", delay=0.2))
    await delayed.withdraw(producer, ref)
    assert await delayed.due_at(producer, ref) is None
    async with at_work("q", processor, url=redis_url):
        again = await producer.enqueue(JobRequest("later", {}, key="k", delay=0.4))
        await until(lambda: ran, 10, "the second one ran")
    assert ran == [again.id]
    for call in (delayed.withdraw(producer, again), delayed.reschedule(producer, again, 5)):
        with pytest.raises(delayed.AlreadyStarted, match="Use `cancel`"):
            await call


@pytest.mark.parametrize("delay", [-1, -0.001, float("nan"), float("inf"), 10**12, "5", None, True])
async def test_an_absurd_delay_is_refused_by_name(producer, delay):
    ref = await producer.enqueue(JobRequest("later", {}, key="ok", delay=60))
    with pytest.raises(InvalidDelay):
        await delayed.reschedule(producer, ref, delay)
    assert await delayed.due_at(producer, ref) is not None, "the job keeps its time"
    if delay is not True:
        with pytest.raises(InvalidDelay):
            await producer.enqueue(JobRequest("later", {}, key="bad", delay=delay))
    counts = await producer.queue("q").getJobCounts()
    assert counts["delayed"] == 1


def test_moments_need_a_time_zone_and_may_not_lie_in_the_past():
    now = datetime(2027, 1, 1, 12, tzinfo=UTC)
    assert delayed.at(now + timedelta(hours=2), now=now.timestamp()) == 7200
    assert delayed.at(now - timedelta(seconds=0.5), now=now.timestamp()) == 0
    assert delayed.after(days=3) == 259_200
    with pytest.raises(InvalidDelay, match="time zone"):
        delayed.at(datetime(2027, 1, 1, 12))
    with pytest.raises(InvalidDelay):
        delayed.at(now - timedelta(minutes=5), now=now.timestamp())
    with pytest.raises(InvalidDelay):
        delayed.after(days=4_000)

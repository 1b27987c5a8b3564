"""Every way a run can end, and what ReliableWorker makes of it in the queue."""

import asyncio
import contextlib
import contextvars
import json
import math
import random
import time

import pytest
from bullmq.custom_errors import DelayedError

from harness.waiting import until
from harness.workers import at_work, counts, queue_at, stock_at_work
from studyhall.patterns.bullmq_worker import ReliableWorker, RetryLater


async def nothing(job, token):
    pass


async def settled(queue, total):
    async def all_finished():
        now = await counts(queue)
        return now.get("completed", 0) + now.get("failed", 0) == total

    await until(all_finished, 20, f"{total} jobs to finish")


async def test_retry_later_consumes_an_attempt_only_when_told(redis_url):
    starts = []

    async def later(job, token):
        starts.append(time.time())
        if len(starts) == 1:
            raise RetryLater(0.3, reason="not yet")
        if len(starts) == 2:
            raise RetryLater(0.1, consume_attempt=True, reason="provider down")
        return "done"

    async with queue_at(redis_url, "q") as queue, at_work("q", later, url=redis_url) as worker:
        delayed = []
        worker.on("delayed", lambda job, error: delayed.append((job.attemptsMade, error.reason)))
        job = await queue.add("job", {}, {"attempts": 3})
        await settled(queue, 1)
        job = await queue.getJob(job.id)
    assert delayed == [(0, "not yet"), (1, "provider down")]
    assert job.attemptsMade == 2  # the consumed one and the completed one
    assert job.returnvalue == "done"
    assert job.failedReason == "provider down"
    assert "RetryLater" in job.stacktrace[0]
    assert starts[1] - starts[0] >= 0.29


async def test_a_job_tells_which_worker_has_it_whichever_way_it_was_taken(redis_url):
    holders = []

    async def later(job, token):
        holders.append(await job.queue.client.hget(f"bull:q:{job.id}", "pb"))
        if len(holders) == 1:
            raise RetryLater(0.01, reason="the next one comes with this answer")

    async with queue_at(redis_url, "q") as queue:
        await queue.addBulk([{"name": "job", "data": {}} for _ in range(3)])
        async with at_work("q", later, url=redis_url, name="mailer", concurrency=1):
            await settled(queue, 3)
    assert holders == ["mailer"] * 4


@pytest.mark.parametrize("backoff", [None, {"type": "fixed", "delay": 20}, {"type": "exponential", "delay": 10}])
async def test_other_errors_follow_the_jobs_own_attempts_and_backoff(redis_url, backoff):
    runs = []

    async def fails(job, token):
        runs.append(job.attemptsMade)
        raise OSError("cannot open \udcff")  # a file name as the OS gave it: not encodable

    async with queue_at(redis_url, "q") as queue, at_work("q", fails, url=redis_url):
        options = {"attempts": 3, "stackTraceLimit": 2}
        job = await queue.add("job", {}, {**options, **({"backoff": backoff} if backoff else {})})
        await settled(queue, 1)
        job = await queue.getJob(job.id)
    assert runs == [0, 1, 2]
    assert job.failedReason == "cannot open \ufffd"
    assert len(job.stacktrace) == 2


async def test_unknown_backoff_fails_the_job_instead_of_leaving_it_active(redis_url):
    async def fails(job, token):
        raise ValueError("boom")

    async with (
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
        stock_at_work("stock", fails, connection=redis_url) as stock,
        at_work("ours", fails, url=redis_url),
    ):
        errors = []
        stock.on("error", lambda *args: errors.append(args))
        for queue in (stock_queue, our_queue):
            await queue.add("job", {}, {"attempts": 3, "backoff": {"type": "jittered"}})
        await settled(our_queue, 1)
        await until(lambda: errors, 10, "stock to fail at failing the job")
        assert await counts(stock_queue) == {"active": 1}
        assert "jittered" in (await our_queue.getFailed())[0].failedReason


@pytest.mark.parametrize("value", [object(), {"when": time}, math.nan, {1, 2}])
async def test_result_that_is_not_json_fails_once_and_says_so(redis_url, value):
    """The stock worker does the finished work again, once per attempt."""
    runs = []

    async def works(job, token):
        runs.append(job.queue.name)
        return value

    async with (
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
        stock_at_work("stock", works, connection=redis_url),
        at_work("ours", works, url=redis_url),
    ):
        for queue in (stock_queue, our_queue):
            await queue.add("job", {}, {"attempts": 3})
            await settled(queue, 1)
        failed = (await our_queue.getFailed())[0]
    assert (runs.count("stock"), runs.count("ours")) == (3, 1)
    assert "cannot be stored as JSON" in failed.failedReason


async def test_unreadable_jobs_fail_and_their_neighbours_run(redis_url, redis_server):
    """Stock: an evicted job runs with no name and no data; one with broken JSON stays active."""
    seen = []

    async def note(job, token):
        seen.append((job.queue.name, job.name))

    names = ("stock", "ours")
    for name in names:
        async with queue_at(redis_url, name) as queue:
            await queue.addBulk([{"name": "good", "data": {}} for _ in range(4)])
        with redis_server.client() as client:
            client.delete(f"bull:{name}:1")
            client.hset(f"bull:{name}:2", "data", "{not json")
            client.hset(f"bull:{name}:3", "opts", "[]")
    async with queue_at(redis_url, "ours") as queue, at_work("ours", note, url=redis_url, concurrency=1):
        await settled(queue, 4)
        assert await counts(queue) == {"completed": 1, "failed": 3}
        reasons = {job.id: job.failedReason for job in await queue.getFailed()}
    assert "noeviction" in reasons["1"]
    assert all("unreadable job" in reason for reason in reasons.values())
    assert seen == [("ours", "good")]
    async with queue_at(redis_url, "stock") as queue, stock_at_work("stock", note, connection=redis_url):
        await until(lambda: ("stock", "good") in seen, 10, "stock to reach the good job")
        assert ("stock", None) in seen
        assert (await counts(queue)).get("active", 0) == 2


async def test_delayed_error_keeps_working(redis_url):
    runs = []

    async def process(job, token):
        runs.append(job.id)
        if len(runs) == 1:
            await job.moveToDelayed(int(time.time() * 1000) + 50, token)
            raise DelayedError

    async with queue_at(redis_url, "q") as queue, at_work("q", process, url=redis_url):
        await queue.add("moves itself", 1)
        await settled(queue, 1)
    assert len(runs) == 2


async def test_cancelled_job_fails_for_good_unless_its_processor_decides_otherwise(redis_url):
    seen = {}

    async def hangs(job, token):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            seen[job.name] = str(error)
            if job.name == "converts":
                raise RetryLater(60, reason="resumable") from error
            raise

    async with queue_at(redis_url, "q") as queue, at_work("q", hangs, url=redis_url) as worker:
        escapes = await queue.add("escapes", {}, {"attempts": 3})
        converts = await queue.add("converts", {}, {"attempts": 3})
        await until(lambda: len(worker.active) == 2, 10, "both to run")
        assert worker.cancel(escapes.id, "user asked")
        assert worker.cancel(converts.id, "user asked")
        await until(lambda: not worker.active, 10, "both to end")
        assert not worker.cancel(escapes.id, "again")
        assert await counts(queue) == {"failed": 1, "delayed": 1}
        assert (await queue.getJob(escapes.id)).failedReason == "cancelled: user asked"
    assert seen == {"escapes": "user asked", "converts": "user asked"}


async def test_processor_that_cancels_itself_and_returns_is_completed(redis_url):
    async def quick(job, token):
        job.queue.cancel(job.id, "too late")
        return "done"

    async with queue_at(redis_url, "q") as queue, at_work("q", quick, url=redis_url, concurrency=1):
        await queue.addBulk([{"name": "job", "data": {}} for _ in range(5)])
        await settled(queue, 5)
        assert await counts(queue) == {"completed": 5}


async def test_drain_releases_a_job_that_ignores_its_cancellation(redis_url, monkeypatch):
    monkeypatch.setattr("studyhall.patterns.bullmq_worker.worker.CLEANUP_SECONDS", 0.2)
    release = asyncio.Event()
    reported = []

    async def stubborn(job, token):
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    async with queue_at(redis_url, "q") as queue:
        async with at_work("q", stubborn, url=redis_url, on_error=reported.append) as worker:
            job = await queue.add("job", {})
            await until(lambda: worker.active, 10, "it to run")
            assert await worker.drain(0.1) == [job.id]
        assert await counts(queue) == {"delayed": 1}
        release.set()
    assert "ignored its cancellation" in str(reported[0])


async def test_a_second_drain_hurries_the_first_and_cancelling_it_stops_nothing(redis_url):
    async def hangs(job, token):
        await asyncio.sleep(60)

    async with queue_at(redis_url, "q") as queue, at_work("q", hangs, url=redis_url) as worker:
        job = await queue.add("job", {})
        await until(lambda: worker.active, 10, "it to run")
        patient = asyncio.create_task(worker.drain(60))
        await asyncio.sleep(0.1)
        patient.cancel()
        assert await asyncio.wait_for(worker.drain(0), 10) == [job.id]
        assert await counts(queue) == {"delayed": 1}


async def test_draining_worker_wakes_another_for_the_jobs_it_left(redis_url, monkeypatch):
    """A worker that hangs up in BZPOPMIN takes the wake-up call with it, and the next one sleeps on."""
    # Longer than the test waits for a job: a lost wake-up call is not made good by the next look.
    monkeypatch.setattr("studyhall.patterns.bullmq_worker.worker.POLL_SECONDS", 25.0)
    async with queue_at(redis_url, "q") as queue, at_work("q", nothing, url=redis_url) as survivor:
        for _ in range(8):
            async with at_work("q", nothing, url=redis_url) as leaver:
                drained = asyncio.create_task(leaver.drain(1))
                before = await queue.getCompletedCount()
                await queue.add("job", {})
                await drained

                async def done(before=before):
                    return bool(await queue.getCompletedCount() > before)

                await until(done, 10, "the job to be done")
        assert survivor.active == {}


async def test_context_variables_do_not_leak_from_job_to_job(redis_url):
    tenant = contextvars.ContextVar("tenant", default="nobody")
    seen = []

    async def process(job, token):
        seen.append(tenant.get())
        tenant.set(f"tenant of job {job.id}")

    async with queue_at(redis_url, "q") as queue:
        await queue.addBulk([{"name": "job", "data": {}} for _ in range(20)])
        async with at_work("q", process, url=redis_url, concurrency=2):
            await settled(queue, 20)
    assert set(seen) == {"nobody"}


async def test_retention_rules_of_the_worker_apply_to_jobs_without_their_own(redis_url):
    async with (
        queue_at(redis_url, "q") as queue,
        at_work("q", nothing, url=redis_url, remove_on_complete={"count": 3}, concurrency=1),
    ):
        for own in ({}, {"removeOnComplete": True}):
            await queue.addBulk([{"name": "job", "data": {}, "opts": own} for _ in range(10)])

        async def drained():
            return set(await counts(queue)) == {"completed"}

        await until(drained, 10, "all to finish")
        assert await counts(queue) == {"completed": 3}


async def test_misuse_raises_with_a_hint(redis_url):
    def sync(job, token): ...

    with pytest.raises(TypeError, match="async def"):
        ReliableWorker("q", sync, url=redis_url)
    with pytest.raises(ValueError, match="at least 1"):
        ReliableWorker("q", nothing, url=redis_url, concurrency=0)
    async with at_work("q", nothing, url=redis_url) as worker:
        with pytest.raises(RuntimeError, match="running"):
            await worker.run()
    with pytest.raises(RuntimeError, match="closed"):
        await worker.run()


async def test_cancelling_run_releases_the_jobs(redis_url, seed):
    """At any moment of its start-up. (While run() awaited redis-py itself, some cancellations vanished.)"""
    choose = random.Random(seed)

    async def hangs(job, token):
        await asyncio.sleep(600)

    for number in range(40):
        async with queue_at(redis_url, f"queue {number}, with blanks") as queue:
            await queue.add("job", {"json": json.dumps("ż")})
            worker = ReliableWorker(queue.name, hangs, url=redis_url, name="erster Wörker")
            running = asyncio.create_task(worker.run())
            await until(lambda w=worker: w.active, 10, "the job to run", every=0)
            for _ in range(choose.randrange(40)):
                await asyncio.sleep(0)
            running.cancel()
            done, _ = await asyncio.wait({running}, timeout=20)
            assert done, "the cancellation was swallowed"
            assert running.cancelled()
            assert await counts(queue) == {"delayed": 1}

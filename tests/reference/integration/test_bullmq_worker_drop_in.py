"""What users of BullMQ's own Python worker know and expect to find."""

import asyncio
import time

import pytest
from bullmq import AbortError

from harness.waiting import until
from harness.workers import at_work, counts, queue_at, until_counts
from studyhall.patterns.bullmq_worker import LOCK_LOST
from studyhall.patterns.dead_letter.sweeping import sweeping


async def nothing(job, token):
    pass


async def ended(queue, total):
    async def all_ended():
        now = await counts(queue)
        return now if now.get("completed", 0) + now.get("failed", 0) == total else {}

    return await until(all_ended, 30, f"{total} jobs to end")


async def test_a_processor_with_a_third_parameter_gets_a_signal_that_cancel_sets(redis_url):
    """It passed the constructor, and every attempt failed for lack of an argument."""

    async def process(job, token, signal):
        if job.name == "quick":
            return "done"
        await signal.wait()
        raise AbortError(signal.reason)

    async with queue_at(redis_url, "q") as queue, at_work("q", process, url=redis_url) as worker:
        failed = []
        worker.on("failed", lambda job, error: failed.append(error))
        await queue.add("quick", {})
        waits = await queue.add("waits", {}, {"attempts": 3})
        await until(lambda: waits.id in worker.active, 10, "it to run")
        assert worker.cancel(waits.id, "user asked")
        assert await ended(queue, 2) == {"completed": 1, "failed": 1}, "a cancelled job does not come back"
    assert [type(error) for error in failed] == [AbortError]
    assert str(failed[0]) == "user asked"


async def test_a_processor_that_ignores_its_signal_is_cancelled_all_the_same(redis_url, monkeypatch):
    monkeypatch.setattr("studyhall.patterns.bullmq_worker.worker.CLEANUP_SECONDS", 0.4)

    async def ignores(job, token, signal):
        await asyncio.sleep(60)

    async with queue_at(redis_url, "q") as queue, at_work("q", ignores, url=redis_url) as worker:
        cancelled, released = await queue.add("cancelled", {}), await queue.add("released", {})
        await until(lambda: len(worker.active) == 2, 10, "both to run")
        worker.cancel(cancelled.id, "user asked")
        await until(lambda: cancelled.id not in worker.active, 10, "it to end")
        assert (await queue.getJob(cancelled.id)).failedReason == "cancelled: user asked"
        assert await worker.drain(0) == [released.id]


async def test_the_signal_says_that_the_lock_is_lost(redis_url, redis_server):
    reasons = []

    async def process(job, token, signal):
        try:
            await asyncio.sleep(60)
        finally:
            reasons.append(signal.reason)

    async with (
        queue_at(redis_url, "q") as queue,
        at_work("q", process, url=redis_url, lock_duration=1, stalled_interval=60) as worker,
    ):
        job = await queue.add("job", {})
        await until(lambda: worker.active, 10, "it to run")
        with redis_server.client() as client:
            client.set(f"bull:q:{job.id}:lock", "another worker's")
        await until(lambda: reasons, 10, "it to be stopped")
    assert reasons == [LOCK_LOST]


async def test_a_backoff_strategy_decides_about_types_of_its_own(redis_url):
    asked = []
    starts = []

    def strategy(failures, kind, error, job):
        asked.append((failures, kind, str(error)))
        return -1 if failures == 3 else 200 * (failures - 1)

    async def fails(job, token):
        starts.append(time.monotonic())
        raise ValueError("boom")

    async with queue_at(redis_url, "q") as queue, at_work("q", fails, url=redis_url, backoff_strategy=strategy):
        await queue.add("job", {}, {"attempts": 9, "backoff": {"type": "mine"}})
        assert await ended(queue, 1) == {"failed": 1}
    assert asked == [(1, "mine", "boom"), (2, "mine", "boom"), (3, "mine", "boom")]
    assert starts[2] - starts[1] > 0.19


@pytest.mark.parametrize("raised", [ValueError("no idea"), SystemExit(2)])
async def test_a_backoff_strategy_that_raises_fails_the_job_with_both_reasons(redis_url, raised):
    def strategy(*_):
        raise raised

    async def fails(job, token):
        raise ValueError("boom")

    async with queue_at(redis_url, "q") as queue, at_work("q", fails, url=redis_url, backoff_strategy=strategy):
        job = await queue.add("job", {}, {"attempts": 9, "backoff": {"type": "mine"}})
        assert await ended(queue, 1) == {"failed": 1}
        assert (await queue.getJob(job.id)).failedReason == f"boom (no retry: {raised})"


async def test_jitter_spreads_the_backoff(redis_url):
    async def fails(job, token):
        raise ValueError("boom")

    async with queue_at(redis_url, "q") as queue, at_work("q", fails, url=redis_url):
        backoff = {"type": "exponential", "delay": 600_000, "jitter": 0.5}
        await queue.addBulk([{"name": "job", "data": {}, "opts": {"attempts": 2, "backoff": backoff}}] * 30)
        await until_counts(queue, {"delayed": 30}, 20, "all to be delayed")
        delays = [int(job.delay) for job in await queue.getDelayed()]
    assert all(300_000 <= delay <= 600_000 for delay in delays)
    assert len(set(delays)) > 20


async def test_metrics_count_what_ended(redis_url, redis_server):
    async def process(job, token):
        if job.name == "fails":
            raise ValueError

    async with queue_at(redis_url, "q") as queue, at_work("q", process, url=redis_url, metrics={"maxDataPoints": 60}):
        await queue.addBulk([{"name": name, "data": {}} for name in ("works", "works", "fails")])
        await ended(queue, 3)
    with redis_server.client() as client:
        numbers = [client.hget(f"bull:q:metrics:{state}", "count") for state in ("completed", "failed")]
    assert numbers == ["2", "1"]


async def test_a_listener_can_be_removed(redis_url):
    heard = []

    def listener(job, result):
        heard.append(job.name)

    async with queue_at(redis_url, "q") as queue, at_work("q", nothing, url=redis_url) as worker:
        worker.on("completed", listener)
        await queue.add("first", {})
        await ended(queue, 1)
        worker.off("completed", listener)
        worker.off("completed", listener)  # no error
        await queue.add("second", {})
        await ended(queue, 2)
    assert heard == ["first"]


async def test_a_paused_worker_takes_nothing_until_it_is_resumed(redis_url):
    started, go = asyncio.Event(), asyncio.Event()
    heard = []

    async def process(job, token):
        if job.name == "long":
            started.set()
            await go.wait()

    async with queue_at(redis_url, "q") as queue, at_work("q", process, url=redis_url) as worker:
        for event in ("paused", "resumed"):
            worker.on(event, lambda event=event: heard.append(event))
        await queue.add("long", {})
        await started.wait()
        pausing = asyncio.create_task(worker.pause())
        await asyncio.sleep(0)
        await queue.addBulk([{"name": "job", "data": {}} for _ in range(5)])
        async with at_work("q", nothing, url=redis_url) as other:  # and it takes no wake-up calls from the others
            await until_counts(queue, {"active": 1, "completed": 5}, 10, "the other worker to do five")
            assert not pausing.done(), "the long job still runs"
            await other.drain(5)
        go.set()
        await asyncio.wait_for(pausing, 10)
        await queue.add("later", {})
        await worker.pause()
        assert await counts(queue) == {"completed": 6, "waiting": 1}
        worker.resume()
        assert await ended(queue, 7) == {"completed": 7}
        await worker.pause()
    assert heard == ["paused", "paused", "resumed", "paused"]


async def test_a_restart_of_redis_is_one_line_and_one_when_it_is_back_and_no_traceback(own_redis, store, caplog):
    sweep = sweeping(["q"], store, own_redis.url, every=0.1)
    sweeps = asyncio.create_task(sweep.run())
    async with at_work("q", nothing, url=own_redis.url):
        await asyncio.to_thread(own_redis.kill)
        await until(lambda: {"periodic", "events"} <= loggers(caplog, "ERROR"), 20, "both say so")
        await asyncio.to_thread(own_redis.restart)
        await until(lambda: {"periodic", "events"} <= loggers(caplog, "WARNING"), 20, "both say that it is back")
    sweep.stop()
    await sweeps
    lines = [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert len(lines) == 4, [record.getMessage() for record in lines]
    assert not any(record.exc_info for record in lines)
    assert any("sweep of dead letters failed: ConnectionError: " in record.getMessage() for record in lines)


def loggers(caplog, level):
    return {record.name.split(".")[-1] for record in caplog.records if record.levelname == level}

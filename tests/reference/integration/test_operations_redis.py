"""What an operator reads: when a job comes back, what stalled, what crashed, and whether the connections suffice."""

import io
import json
import logging
from datetime import datetime

import pytest

from harness.pipelines import full_pipeline, full_producer
from harness.waiting import until
from harness.workers import at_work, queue_at
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, crowded, open_store
from studyhall.patterns.observability import JsonLines
from studyhall.patterns.observability.metrics import JobMetrics
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.stall_budget import CRASH_LIMIT
from studyhall.patterns.typed_jobs import JobTypes, Payload


@pytest.fixture
async def store(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'operations.db'}")
    await create_all(store)
    yield store
    await close(store)


@pytest.fixture
def lines():
    out, logger = io.StringIO(), logging.getLogger("operations")
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    logger.handlers[:], logger.propagate = [handler], False
    yield logger, out
    logger.handlers[:], logger.propagate = [], True


class Number(Payload):
    number: int


async def test_retries_say_when_and_stalls_and_crash_loops_are_counted(redis_url, store, lines):
    ran = []
    at_once = []
    metrics = JobMetrics()

    async def handle(ctx, payload: Number):
        ran.append(ctx.job.processedOn / 1000)
        at_once.append('jobs_running{name="n",queue="q"} 0.0' not in metrics.render().decode())
        if len(ran) == 1:
            raise ValueError("not yet")

    jobs = JobTypes()
    jobs.register(
        name="n", payload=Number, handler=handle, queue="q", retry=RetryPolicy(base=1, cap=1, floor=1, attempts=3)
    )
    producer = full_producer(jobs, redis_url, timeout=10)
    retried, stalled, condemned = [
        (await producer.enqueue(JobRequest("n", {"number": n}, key=f"k{n}"))).id for n in range(3)
    ]
    async with queue_at(redis_url, "q") as queue:
        redis = queue.client
        # As a worker that died leaves it: active, and no lock.
        for ident in (stalled, condemned):
            await redis.zrem("bull:q:prioritized", ident)
            await redis.lpush("bull:q:active", ident)
        await redis.hset(f"bull:q:{condemned}", "stc", CRASH_LIMIT)
        pipeline = full_pipeline(jobs, store, metrics=metrics, log=lines[0])
        async with at_work("q", pipeline, url=redis_url, stalled_interval=0.3) as worker:
            metrics.count_stalls(worker)
            await until(lambda: _ended(queue), 60, "end of all three")
    await producer.close()
    logged = [json.loads(line) for line in lines[1].getvalue().splitlines()]
    (failed,) = [line for line in logged if line["outcome"] == "retry"]
    # By the clock of the Redis server, and a loaded machine is late, never early.
    promised = datetime.fromisoformat(failed["retry_at"]).timestamp()
    next_run = [at for at in ran if at > ran[0]][-1]
    assert failed["job_id"] == retried
    assert -0.1 <= next_run - promised < 10
    assert not any("retry_at" in line for line in logged if line is not failed)
    text = metrics.render().decode()
    assert all(at_once)
    assert 'jobs_running{name="n",queue="q"} 0.0' in text
    assert 'job_stalls_total{queue="q"} 2.0' in text
    assert 'job_errors_total{error="ValueError",queue="q"} 1.0' in text
    assert 'job_errors_total{error="CrashLoop",queue="q"} 1.0' in text


async def _ended(queue):
    counts = await queue.getJobCounts("completed", "failed")
    return sum(counts.values()) == 3


async def test_too_few_connections_for_the_jobs_are_reported_at_the_start(store):
    assert await crowded(store, 400) is None
    assert "401 jobs at once share 8 connections" in str(await crowded(store, 401))


async def test_a_postgresql_without_free_connections_is_reported_at_the_start(postgres_url):
    store = open_store(postgres_url)
    try:
        assert await crowded(store, 20) is None
        # More than the server has, instead of taking them away from other tests.
        store.sync_engine.pool._max_overflow = 1_000
        assert "max_connections" in str(await crowded(store, 20))
    finally:
        await close(store)

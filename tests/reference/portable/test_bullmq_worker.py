"""A worker on a real queue: results, failures for good, waiting without an attempt."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from bullmq import Job, Queue
from redis.asyncio import Redis

from harness.waiting import until
from studyhall.patterns.bullmq_worker import FailPermanently, ReliableWorker, RetryLater
from studyhall.patterns.core.connections import producer_client


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with producer_client(redis_url) as client:
        yield client


@contextlib.asynccontextmanager
async def working(queue: str, processor: Any, url: str) -> AsyncIterator[ReliableWorker]:
    worker = ReliableWorker(queue, processor, url=url)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        await worker.drain(5)
        await running


async def test_jobs_are_done_retried_later_without_an_attempt_or_failed_for_good(redis: Redis, redis_url: str):
    seen: list[str] = []

    async def process(job: Any, token: str) -> str:
        seen.append(job.id)
        if job.id == "poison":
            raise FailPermanently("no use")
        if job.id == "later" and seen.count("later") == 1:
            raise RetryLater(0.01, reason="busy")
        return f"did {job.id}"

    queue = Queue("work", {"connection": redis})
    for name in ("plain", "later", "poison"):
        await queue.add("do", {}, {"jobId": name, "attempts": 3})
    async with working("work", process, redis_url):
        await until(lambda: _ended(queue), 20, lambda: f"the end of all three, got as far as {seen}")
    later, poison = await Job.fromId(queue, "later"), await Job.fromId(queue, "poison")
    assert later is not None
    assert poison is not None
    assert (later.returnvalue, later.attemptsMade) == ("did later", 1)
    assert (poison.failedReason, seen.count("poison")) == ("no use", 1)


async def _ended(queue: Any) -> bool:
    counts = await queue.getJobCounts()
    return bool(counts["completed"] == 2 and counts["failed"] == 1)

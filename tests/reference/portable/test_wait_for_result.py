"""The result of a job, whenever it ended; one that failed or runs on says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.request import JobRef
from studyhall.patterns.wait_for_result import JobFailed, JobUnknown, Results, StillRunning


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with producer_client(redis_url) as client:
        yield client


class Stream:
    """Stands for `ProgressStream`."""

    @contextlib.contextmanager
    def ending(self, queue: str, job_id: str) -> Iterator[asyncio.Event]:
        yield asyncio.Event()


def ref(ident: str) -> JobRef:
    return JobRef("mails", "mail", ident, ident)


async def test_every_end_is_reported(redis: Redis):
    results = Results(Stream(), redis)
    for ident, fields in {
        "done": {"name": "mail", "returnvalue": '{"sent": 3}'},
        "dead": {"name": "mail", "failedReason": "no such host"},
        "busy": {"name": "mail"},
    }.items():
        await redis.hset(f"bull:mails:{ident}", mapping=fields)  # type: ignore[misc]
    await redis.zadd("bull:mails:completed", {"done": 1})
    await redis.zadd("bull:mails:failed", {"dead": 1})
    assert await results.wait(ref("done"), timeout=5) == {"sent": 3}
    with pytest.raises(JobFailed, match="no such host"):
        await results.wait(ref("dead"), timeout=5)
    with pytest.raises(StillRunning):
        await results.wait(ref("busy"), timeout=0.05)
    with pytest.raises(JobUnknown):
        await results.wait(ref("never"), timeout=30)

"""A full queue is refused before it is too long to be worth waiting in."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from studyhall.patterns.backpressure import Admission, Limits
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Overloaded


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with producer_client(redis_url) as client:
        yield client


async def test_a_full_queue_is_refused_with_a_time_to_come_back(redis: Redis):
    admission = Admission(redis, Limits(depth=2, age=None), cache=0.0, retry_after=7.0)
    await admission.admit("work")
    await redis.rpush("bull:work:wait", "1", "2")  # as BullMQ keeps what waits
    with pytest.raises(Overloaded) as refused:
        await admission.admit("work")
    assert refused.value.retry_after >= 7.0
    await admission.admit("another")
    assert (await admission.load("work")).states["waiting"] == 2

"""A tenant over its budget gets a turn of its own; others do not wait for it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.rate_limit import UnknownTenant, named_tenant, queue_limit, tenant_limit


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with producer_client(redis_url) as client:
        yield client


async def test_over_the_burst_every_job_gets_a_later_turn_and_other_tenants_go_on(redis: Redis):
    limit = tenant_limit(redis, rate=0.01, burst=2)
    turns = [await limit.turn("heavy", f"job-{number}") for number in range(4)]
    assert turns[:2] == [0, 0]
    assert 0 < turns[2] < turns[3]
    assert await limit.turn("light", "job-x") == 0


def test_a_queue_limit_is_bullmqs():
    assert queue_limit(10, per=2) == {"max": 10, "duration": 2000}
    assert queue_limit(10, per=2, evenly=True) == {"max": 1, "duration": 200}


def test_a_job_of_nobody_is_refused():
    assert named_tenant("acme", {"acme"}) == "acme"
    for wrong in (None, "", 7, "others"):
        with pytest.raises(UnknownTenant):
            named_tenant(wrong, {"acme"})

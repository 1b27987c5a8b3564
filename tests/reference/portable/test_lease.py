"""One holder at a time, and a number that exposes a stale one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.lease import Lease, LeaseTaken, StaleFence, check_fence


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with producer_client(redis_url) as client:
        yield client


async def test_one_gets_in_and_the_next_has_a_higher_number(redis: Redis, store: AsyncEngine):
    async with Lease(redis, "reports", ttl=5) as first:
        with pytest.raises(LeaseTaken):
            async with Lease(redis, "reports", ttl=5):
                pass
    async with Lease(redis, "reports", ttl=5) as second:
        assert second.fence > first.fence
        async with begin(store) as tx:
            await check_fence(tx, "reports", second.fence)
    with pytest.raises(StaleFence):
        async with begin(store) as tx:
            await check_fence(tx, "reports", first.fence)

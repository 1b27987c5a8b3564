"""Shared by all processes: a dead provider is left alone, then one caller probes."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from harness.waiting import until
from studyhall.patterns.circuit_breaker import BreakerOpen, CircuitBreaker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Transient


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with producer_client(redis_url) as client:
        yield client


async def test_it_opens_for_everybody_and_one_success_closes_it(redis: Redis):
    calls: list[bool] = []

    async def call(works: bool) -> str:
        calls.append(works)
        if not works:
            raise Transient("down")
        return "ok"

    here, there = (CircuitBreaker(redis, "carrier", failures=3, cooldown=2) for _ in range(2))
    for _ in range(3):
        with pytest.raises(Transient):
            await here.call(call, False)
    with pytest.raises(BreakerOpen) as refused:
        await there.call(call, True)
    assert 0 < refused.value.retry_after <= 2
    assert calls == [False] * 3

    async def probed() -> bool:
        try:
            return await there.call(call, True) == "ok"
        except BreakerOpen:
            return False

    await until(probed, 30)
    assert (await here.state()).state == "closed"

"""Backlogs are seen in every state, and an incident is one alert however the number wobbles."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.health import measure
from studyhall.patterns.health.alerts import Alert, Rule, evaluate


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


RULES = [Rule("*.oldest", raise_at=60, clear_at=30, because="nobody works")]


async def test_a_wobbling_number_is_one_alert_and_one_all_clear(store: AsyncEngine):
    sent: list[bool] = []

    async def send(alert: Alert) -> None:
        sent.append(alert.raised)

    for value in (10, 61, 59, 62, 40, 29, 31):
        await evaluate(store, {"mails.oldest": value}, RULES, send)
    assert sent == [True, False]


async def test_what_is_prioritized_or_overdue_counts_as_backlog(redis: Redis):
    await redis.zadd("bull:mails:prioritized", {"1": 1, "2": 2})
    await redis.zadd("bull:mails:delayed", {"3": 4096.0})  # due in 1970
    (queue,) = (await measure(redis, ["mails"])).queues
    assert (queue.prioritized, queue.overdue, queue.backlog) == (2, 1, 3)

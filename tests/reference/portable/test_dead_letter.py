"""What failed for good is archived once, and put back to work under its own id."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.dead_letter import AlreadyReplayed, DeadLetter, list_dead_letters, replay, sweep


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


async def dead(redis: Redis, ident: str) -> None:
    """A job as BullMQ leaves it after its last attempt."""
    fields = {
        "name": "mail",
        "data": json.dumps({"to": "ann"}),
        "opts": json.dumps({"attempts": 3, "jobId": ident}),
        "failedReason": "no such host",
        "timestamp": "1700000000000",
        "finishedOn": "1700000001000",
        "attemptsMade": "3",
        "atm": "3",
    }
    await redis.hset(f"bull:mails:{ident}", mapping=fields)  # type: ignore[misc]
    await redis.zadd("bull:mails:failed", {ident: 1_700_000_001_000})


async def test_a_dead_job_is_kept_once_and_replayed_under_its_id(redis: Redis, store: AsyncEngine):
    await dead(redis, "m-1")
    alerts: list[str] = []

    async def alert(letter: DeadLetter) -> None:
        alerts.append(letter.reason)

    assert (await sweep(["mails"], redis, store, alert)).archived == 1
    assert (await sweep(["mails"], redis, store, alert)).archived == 0
    assert alerts == ["no such host"]
    (letter,) = await list_dead_letters(store)
    assert (letter.job_id, letter.data, letter.attempts_made) == ("m-1", {"to": "ann"}, 3)
    await replay(store, redis, letter.id)
    assert await redis.lrange("bull:mails:wait", 0, -1) == ["m-1"]  # type: ignore[misc]
    assert await redis.hget("bull:mails:m-1", "data") == json.dumps({"to": "ann"})  # type: ignore[misc]
    with pytest.raises(AlreadyReplayed):
        await replay(store, redis, letter.id)

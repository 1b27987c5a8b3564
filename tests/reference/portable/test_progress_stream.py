"""A client that comes back gets what it missed, once and in order."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from redis.asyncio import Redis

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.progress_stream import ProgressStream, sse


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with producer_client(redis_url) as client:
        yield client


async def test_a_reconnect_goes_on_after_the_last_id_seen(redis: Redis, redis_url: str):
    stream = ProgressStream(redis_url, ["mails"])
    reading = asyncio.create_task(stream.run())
    try:
        await stream.ready()
        for number in range(4):
            fields = {"event": "progress", "jobId": "7", "data": f'{{"percent": {number}}}'}
            await redis.xadd("bull:mails:events", fields)  # type: ignore[arg-type]
        seen, last = [], "0-0"
        for _ in range(2):  # two connections, two events each
            events = stream.events(last if seen else "mails:0-0", idle=5)
            for _ in range(2):
                event = await asyncio.wait_for(anext(events), 20)
                seen.append(event.progress["percent"])
                last = event.cursor
            await events.aclose()
        assert seen == [0, 1, 2, 3]
    finally:
        reading.cancel()
        await asyncio.wait({reading})


def test_an_event_is_written_as_browsers_read_it():
    assert sse("progress", {"percent": 3}, "1-0") == 'id: 1-0\nevent: progress\ndata: {"percent":3}\n\n'

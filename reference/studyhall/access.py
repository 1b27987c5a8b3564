"""What operators' commands open: the store alone, or Redis too. The whole app takes half a second to import.

Of the tables, only those that a command imports are made if they are missing."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .settings import Settings
from .terminal import settings_for

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from sqlalchemy.ext.asyncio import AsyncEngine

QUEUES = ("chat", "documents", "explanations", "graphs", "maintenance", "quizzes", "reminders")  # of `job_types`


@dataclass(frozen=True, slots=True)
class Access:
    settings: Settings
    redis: "Redis"
    store: "AsyncEngine"


@asynccontextmanager
async def opened(data_dir: Path | None) -> AsyncIterator["AsyncEngine"]:
    """The database alone."""
    async with _store(settings_for(data_dir)) as store:
        yield store


@asynccontextmanager
async def connected(data_dir: Path | None) -> AsyncIterator[Access]:
    """The database and a client of Redis."""
    settings = settings_for(data_dir)
    settings.keys()  # a wrong one is noticed before a worker meets it
    with redis_url(settings) as url:
        from .patterns.core.connections import producer_client

        async with _store(settings) as store:
            redis = producer_client(url)
            try:
                yield Access(settings, redis, store)
            finally:
                await redis.aclose()


@contextmanager
def redis_url(settings: Settings) -> Iterator[str]:
    """Where Redis is: found, or started, as long as this lasts."""
    from .patterns.engine import ensure_redis

    server = ensure_redis(settings.data_dir, settings.redis_url)
    try:
        yield server.url
    finally:
        server.stop()


@asynccontextmanager
async def _store(settings: Settings) -> AsyncIterator["AsyncEngine"]:
    from .patterns.core import open_store as stores

    settings.make_data_dir()
    store = stores.open_store(settings.store_url)
    try:
        await stores.create_all(store)
        yield store
    finally:
        await stores.close(store)

"""Opens what every process needs, in one place: Redis, the database, the job types, a producer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from .jobs import job_types
from .patterns.core.open_store import close, create_all, open_store
from .patterns.engine import RedisServer, ensure_redis
from .patterns.producer import Producer
from .patterns.signed_payload import Signer, signing
from .patterns.typed_jobs import JobTypes, validated
from .settings import Settings

__all__ = ["App", "open_app"]


@dataclass(frozen=True, slots=True)
class App:
    settings: Settings
    redis: RedisServer
    store: AsyncEngine
    jobs: JobTypes
    signer: Signer
    producer: Producer


@asynccontextmanager
async def open_app(settings: Settings, *, redis_may_be_away: bool = False) -> AsyncIterator[App]:
    """Find or start Redis, open the database, close both at the end."""
    jobs, signer = job_types(), Signer(settings.keys())
    redis = ensure_redis(settings.data_dir, settings.redis_url, may_be_away=redis_may_be_away)
    try:
        store = open_store(settings.store_url)
        try:
            if settings.create_tables:
                await create_all(store)
            # Every job passes these steps on its way into the queue.
            producer = Producer(
                redis.url,
                validated(jobs),
                signing(signer),
            )
            try:
                yield App(settings, redis, store, jobs, signer, producer)
            finally:
                await producer.close()
        finally:
            await close(store)
    finally:
        redis.stop()

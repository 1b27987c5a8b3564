"""Opens what every StudyHall process needs, in one place: Redis, the database, the job types, a producer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from .jobs import job_types
from .patterns import store as stores
from .patterns import tracing
from .patterns.engine import RedisServer, ensure_redis
from .patterns.producer import Producer
from .patterns.signed_payload import Signer
from .patterns.typed_jobs import JobTypes
from .settings import Settings

__all__ = ["App", "open_app"]

log = logging.getLogger("studyhall")


@dataclass(frozen=True, slots=True)
class App:
    settings: Settings
    redis: RedisServer
    store: AsyncEngine
    jobs: JobTypes
    signer: Signer
    producer: Producer


@asynccontextmanager
async def open_app(settings: Settings) -> AsyncIterator[App]:
    """Find or start Redis, open the database, close both at the end."""
    redis = ensure_redis(settings.data_dir, settings.redis_url)
    for warning in redis.warnings:
        log.warning(warning)
    try:
        store = stores.open_store(settings.store_url)
        try:
            await stores.create_all(store)
            traces = tracing.to_file(settings.trace_file, "studyhall") if settings.trace_file else None
            jobs, signer = job_types(), Signer(settings.keys())
            producer = Producer(jobs, redis.url, signer=signer)
            try:
                yield App(settings, redis, store, jobs, signer, producer)
            finally:
                await producer.close()
                if traces is not None:
                    traces.shutdown()
        finally:
            await stores.close(store)
    finally:
        redis.stop()

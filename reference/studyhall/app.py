"""Opens what every StudyHall process needs, in one place: Redis, the database, the job types, a producer."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from .database import open_database
from .jobs import job_types
from .limits import admission
from .patterns import tracing
from .patterns.claim_check import small
from .patterns.degraded import DegradedProducer
from .patterns.engine import RedisServer, ensure_redis
from .patterns.engine.check import Unreachable, without_secrets
from .patterns.flow import Flows
from .patterns.producer import Producer
from .patterns.signed_payload import Signer, signing
from .patterns.typed_jobs import JobTypes, validated
from .settings import Settings

log = logging.getLogger("studyhall")


@dataclass(frozen=True, slots=True)
class App:
    settings: Settings
    redis: RedisServer
    store: AsyncEngine
    jobs: JobTypes
    signer: Signer
    producer: Producer
    degraded: DegradedProducer  # for uploads: accepts while Redis is away


@asynccontextmanager
async def open_app(settings: Settings, *, edge: bool = False) -> AsyncIterator[App]:
    """Find or start Redis, open the database, close both at the end.

    `edge` is for processes that take requests from outside: they refuse when the queues are too long, and they
    start while the configured Redis is away. Workers do neither: follow-up work must get in.
    """
    settings.make_data_dir()  # files live here, even when all servers are elsewhere
    redis = _redis(settings, edge)
    for warning in redis.warnings:
        log.warning(warning)
    try:
        async with open_database(settings) as store:
            traces = tracing.to_file(settings.trace_file, "studyhall") if settings.trace_file else None
            jobs, signer = job_types(), Signer(settings.keys())
            producer = Producer(redis.url, validated(jobs), tracing.tracing_adds(), signing(signer), small(), Flows())
            if edge:
                producer.admission = admission(settings, producer.redis)
            try:
                degraded = DegradedProducer(producer, store)
                yield App(settings, redis, store, jobs, signer, producer, degraded)
            finally:
                await producer.close()
                if traces is not None:
                    traces.shutdown()
    finally:
        redis.stop()


def _redis(settings: Settings, edge: bool) -> RedisServer:
    try:
        return ensure_redis(settings.data_dir, settings.redis_url)
    except Unreachable as error:
        if not edge or not settings.redis_url:
            raise
        warning = f"{error} Requests are kept in the database until it is back."
        return RedisServer(settings.redis_url, "unknown", without_secrets(settings.redis_url), warnings=[warning])

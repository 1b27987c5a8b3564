"""Puts the API together. Nothing is opened before the server starts, all of it is closed when it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from studyhall.app import open_app
from studyhall.orders.service import seed_packs
from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.store import begin
from studyhall.patterns.dead_letter import reason_of
from studyhall.patterns.deferred_reply import DeferredReplies
from studyhall.patterns.idempotency import result_of
from studyhall.patterns.in_process_tasks import Tasks
from studyhall.patterns.progress_stream import ProgressStream
from studyhall.patterns.request_dedup import RequestDedup
from studyhall.patterns.timers import every
from studyhall.patterns.wait_for_result import Results
from studyhall.settings import Settings

from . import (
    admin_dead_letters,
    admin_jobs,
    admin_state,
    documents,
    events,
    interactions,
    orders,
    probes,
    reading,
)
from .gate import Gate
from .problems import install
from .state import ApiState, Streams

__all__ = ["create_app"]

SAMPLE_SECONDS = 5.0
CONSOLE = Path(__file__).resolve().parent.parent / "console"


def create_app(settings: Settings) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        async with open_app(settings, edge=True) as app:
            async with begin(app.store) as tx:
                await seed_packs(tx)
            stream = ProgressStream(app.redis.url, app.jobs.queues)
            tasks = Tasks()
            api.state.studyhall = state = ApiState(
                app=app,
                stream=stream,
                results=Results(
                    stream, app.producer.redis, stored=result_of(app.store), failed=reason_of(app.store)
                ),
                tasks=tasks,
                uploads=RequestDedup(app.store, "uploads"),
                orders=RequestDedup(app.store, "orders"),
                replies=DeferredReplies(app.store, life=settings.chat_token_seconds),
                streams=Streams(settings.event_streams, settings.event_streams_per_client),
            )

            async def sample() -> None:
                with contextlib.suppress(QueueUnavailable):
                    state.history.append(await admin_jobs.measured(state))

            reader = asyncio.create_task(stream.run(), name="event streams")
            # A timer of this process for what this process shows: three instances have three charts, as they should.
            sampling = asyncio.create_task(every(SAMPLE_SECONDS, sample), name="charts")
            try:
                yield
            finally:
                await tasks.drain(settings.grace_seconds)
                reader.cancel()
                sampling.cancel()
                await asyncio.wait({reader, sampling}, timeout=5)

    api = FastAPI(
        title="StudyHall",
        version="1",
        summary="Documents in, concept graphs, quizzes and explanations out; study packs for sale.",
        lifespan=lifespan,
        docs_url=None,  # the stock pages load their scripts from another host
        redoc_url=None,
    )
    install(api)
    for part in (
        probes,
        documents,
        orders,
        interactions,
        events,
        admin_jobs,
        admin_dead_letters,
        admin_state,
        reading,
    ):
        api.include_router(part.router)
    if CONSOLE.is_dir():
        api.mount("/", StaticFiles(directory=CONSOLE, html=True), name="console")
    api.add_middleware(Gate, settings=settings)
    return api

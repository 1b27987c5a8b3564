"""Builds the API. Nothing is opened before the server starts, everything is closed when it stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from queuesmith.console import Console
from queuesmith.console.app import include
from queuesmith.console.gate import Gate
from queuesmith.console.problems import install
from queuesmith.console.queues import sampling
from studyhall.app import open_app
from studyhall.orders.service import seed_packs
from studyhall.patterns.core.store import begin
from studyhall.patterns.dead_letter import reason_of
from studyhall.patterns.deferred_reply import DeferredReplies
from studyhall.patterns.idempotency import result_of
from studyhall.patterns.in_process_tasks import Tasks
from studyhall.patterns.progress_stream import ProgressStream
from studyhall.patterns.request_dedup import RequestDedup
from studyhall.patterns.wait_for_result import Results
from studyhall.settings import Settings

from . import admin_state, documents, events, interactions, orders, probes, reading
from .problems import MEANINGS
from .state import ApiState, Streams

VIEWS = Path(__file__).resolve().parent.parent / "console"  # StudyHall's own views in the console
FORM_OVERHEAD = 16 * 1024  # multipart headers around a file


def create_app(settings: Settings) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        async with open_app(settings, edge=True) as app:
            async with begin(app.store) as tx:
                await seed_packs(tx)
            stream = ProgressStream(app.redis.url, app.jobs.queues)
            tasks = Tasks()
            api.state.studyhall = ApiState(
                app=app,
                stream=stream,
                results=Results(stream, app.producer.redis, stored=result_of(app.store), failed=reason_of(app.store)),
                tasks=tasks,
                uploads=RequestDedup(app.store, "uploads"),
                orders=RequestDedup(app.store, "orders"),
                replies=DeferredReplies(app.store, life=settings.chat_token_seconds),
                streams=Streams(settings.event_streams, settings.event_streams_per_client),
            )

            api.state.console = console = Console(
                app.producer,
                settings.admin_token or "",
                app.store,
                app.jobs.queues,
                adds=False,  # a worker refuses what was not signed here
                token_name="STUDYHALL_ADMIN_TOKEN",
                tasks=tasks,
            )
            reader = asyncio.create_task(stream.run(), name="event streams")
            # A timer per process, for what that process shows: three instances have three charts, as they should.
            charts = asyncio.create_task(sampling(console), name="charts")
            try:
                yield
            finally:
                await tasks.drain(settings.grace_seconds)
                reader.cancel()
                charts.cancel()
                await asyncio.wait({reader, charts}, timeout=5)

    api = FastAPI(
        title="StudyHall",
        version="1",
        summary="Documents in, concept graphs, quizzes and explanations out; study packs for sale.",
        lifespan=lifespan,
        docs_url=None,  # the stock pages load their scripts from another host
        redoc_url=None,
    )
    install(api, MEANINGS)
    for part in (probes, documents, orders, interactions, events, admin_state, reading):
        api.include_router(part.router)
    api.mount("/studyhall", StaticFiles(directory=VIEWS), name="views")
    include(api, None, name="StudyHall", views=["documents", "breakers"], extra="studyhall", live=True)
    api.add_middleware(
        Gate,
        hosts=settings.allowed_hosts.split(","),
        rate=settings.request_rate,
        bodies={"/documents": settings.max_document_bytes + FORM_OVERHEAD},
    )
    return api

"""The HTTP side: takes requests, answers at once, leaves the work to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import uuid4

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
{@% if kind == 'async-flow' %@}
from fastapi.sse import EventSourceResponse, ServerSentEvent
{@% endif %@}
from pydantic import BaseModel

from .app import App, open_app
from .edge import caller, console_at, guard
from .jobs import {@ job_class @}
from .lookup import JOB, State, look
{@% if kind == 'async-flow' %@}
from .patterns.core.errors import QueueUnavailable
{@% endif %@}
from .patterns.core.request import JobRequest
from .patterns.core.store import ping
from .patterns.health import problems
from .patterns.health.exposition import MEDIA_TYPE, exposition
from .patterns.idempotency import Inbox, fingerprint
{@% if kind == 'async-flow' %@}
from .patterns.progress_stream import ProgressStream
{@% endif %@}
from .settings import Settings
from .upkeep import measured, receivers, watching

__all__ = ["create_api"]
{@% if kind == 'async-flow' %@}

ENDED = {"completed", "failed"}
QUIET = 2.0  # seconds without news until a watched job is looked at anyway
{@% endif %@}


class Accepted(BaseModel):
    id: str


def _opened(request: Request) -> App:
    app: App = request.app.state.opened
    return app


Opened = Annotated[App, Depends(_opened)]


def create_api(settings: Settings) -> FastAPI:
    tell = receivers(settings)  # here, so that a wrong address fails at the start

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        async with open_app(settings) as opened, console_at(api, settings, opened.redis.url):
            api.state.opened, api.state.requests = opened, Inbox(opened.store, f"requests/{JOB}")
            beside = [asyncio.create_task(watching(opened, tell).run())]
{@% if kind == 'async-flow' %@}
            # One reader of the queues' events for all clients of this process.
            api.state.news = ProgressStream(opened.redis.url, opened.jobs.queues)
            beside.append(asyncio.create_task(api.state.news.run()))
{@% endif %@}
            yield
            for task in beside:
                task.cancel()
            await asyncio.wait(beside, timeout=5)

    # The stock documentation pages load scripts from another host; /openapi.json is ours.
    api = FastAPI(
        title="{@ project_name @}",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    guard(api, settings, {@ job_class @})
    api.post(f"/{JOB}", status_code=202)(request_job)
    api.get(f"/{JOB}/{{ident}}")(job_state)
{@% if kind == 'async-flow' %@}
    api.get(f"/{JOB}/{{ident}}/events", response_class=EventSourceResponse)(job_events)
{@% endif %@}
    api.get("/healthz")(alive)
    api.get("/readyz")(ready)
    api.get("/metrics")(metrics)
    return api


async def request_job(
    payload: {@ job_class @},
    app: Opened,
    request: Request,
    response: Response,
    idempotency_key: Annotated[str | None, Header(max_length=200, pattern=r"^[\x21-\x7e]+$")] = None,
) -> Accepted:
    """Send the same `Idempotency-Key` again after a lost answer: it is the same job, not a second one."""
    ident = uuid4().hex
    if idempotency_key is not None:
        # The first id stands for this caller and key. The same key with another body is refused: KeyReused.
        requests: Inbox = request.app.state.requests
        name = fingerprint([caller(request), idempotency_key])
        ident = await requests.record(name, fingerprint(payload), ident)
    await app.producer.enqueue(JobRequest(JOB, payload, key=ident))
    response.headers["Location"] = f"/{JOB}/{ident}"
    return Accepted(id=ident)


async def job_state(ident: str, app: Opened) -> State:
    if (state := await look(app, ident)) is None:
        raise HTTPException(404, f"no {JOB} with this id")
    return state


{@% if kind == 'async-flow' %@}
async def job_events(ident: str, app: Opened, request: Request) -> AsyncIterator[ServerSentEvent]:
    """Progress as server-sent events until the job ends. A client may reconnect to any instance."""
    news: ProgressStream = request.app.state.news
    ref = app.producer.ref(JobRequest(JOB, {}, key=ident))
    last = await look(app, ident)
    if last is None:
        yield ServerSentEvent(event="unknown")
        return
    yield ServerSentEvent(event=last.state, data=last.model_dump())
    events = news.events(queues=[ref.queue], idle=QUIET)
    while last.state not in ENDED:
        event = await anext(events)
        if event.job_id not in (ref.id, ""):
            continue  # another job's; no id: a quiet moment, or a gap
        try:
            state = await look(app, ident) or last
        except QueueUnavailable:
            continue  # Redis is away for a moment: the stream goes on when it is back
        if state != last:
            last = state
            yield ServerSentEvent(event=last.state, data=last.model_dump())


{@% endif %@}
async def alive() -> dict[str, str]:
    """The process answers. Nothing else is checked: a restart would not bring Redis back."""
    return {"status": "ok"}


async def ready(app: Opened) -> JSONResponse:
    """503 while Redis or the database does not answer, or a table lacks columns of this version."""
    down = await problems(redis=app.producer.redis.ping, database=lambda: ping(app.store))
    return JSONResponse(dict(down), status_code=503 if down else 200)


async def metrics(app: Opened) -> PlainTextResponse:
    """For Prometheus: what ops/alerts.yml and ops/dashboard.json use."""
    return PlainTextResponse(exposition((await measured(app))[0]), media_type=MEDIA_TYPE)

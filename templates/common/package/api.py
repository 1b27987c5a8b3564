"""The HTTP side: takes requests, answers at once, leaves the work to the workers."""

from __future__ import annotations

{@% if kind == 'async-flow' %@}
import asyncio
{@% endif %@}
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import uuid4

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse
{@% if kind == 'async-flow' %@}
from fastapi.sse import EventSourceResponse, ServerSentEvent
{@% endif %@}
from pydantic import BaseModel
from sqlalchemy import select

from .app import App, open_app
from .db import {@ job_name @}_results as results
from .jobs import {@ job_class @}
from .patterns import health
from .patterns.dead_letter_archive import dead_letters
from .patterns.observability import JobMetrics
{@% if kind == 'async-flow' %@}
from .patterns.producer import FailedTwin, JobRequest, QueueUnavailable
from .patterns.progress_stream import ProgressStream
{@% else %@}
from .patterns.producer import FailedTwin, JobRequest, QueueUnavailable
{@% endif %@}
from .patterns.store import read
from .settings import Settings

__all__ = ["create_api"]

JOB = "{@ job @}"
STATES = {"active": "running", "completed": "completed", "failed": "failed"}
{@% if kind == 'async-flow' %@}
ENDED = {"completed", "failed"}
QUIET = 2.0  # seconds without news after which a watched job is looked at anyway
{@% endif %@}


class Accepted(BaseModel):
    id: str


class State(BaseModel):
    """`waiting`, `running`, `completed`, or `failed`: for good, it lies in the dead letters."""

    id: str
    state: str
    percent: float = 0.0
    message: str = ""


def _opened(request: Request) -> App:
    app: App = request.app.state.opened
    return app


Opened = Annotated[App, Depends(_opened)]


def create_api(settings: Settings) -> FastAPI:
    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        async with open_app(settings) as opened:
            api.state.opened, api.state.metrics = opened, JobMetrics()
{@% if kind == 'async-flow' %@}
            # One reader of the queues' events for all clients of this process.
            api.state.news = ProgressStream(opened.redis.url, opened.jobs.queues)
            reading = asyncio.create_task(api.state.news.run())
            yield
            reading.cancel()
            await asyncio.wait([reading])
{@% else %@}
            yield
{@% endif %@}

    api = FastAPI(title="{@ project_name @}", lifespan=lifespan)
    api.post(f"/{JOB}", status_code=202)(request_job)
    api.get(f"/{JOB}/{{ident}}")(job_state)
{@% if kind == 'async-flow' %@}
    api.get(f"/{JOB}/{{ident}}/events", response_class=EventSourceResponse)(job_events)
{@% endif %@}
    api.get("/readyz")(ready)
    api.get("/metrics")(metrics)
    api.exception_handler(QueueUnavailable)(_try_again)
    api.exception_handler(FailedTwin)(_failed_before)
    return api


async def request_job(
    payload: {@ job_class @},
    app: Opened,
    response: Response,
    idempotency_key: Annotated[str | None, Header(max_length=200, pattern=r"^[\w.:-]+$")] = None,
) -> Accepted:
    """Send the same `Idempotency-Key` again after a lost answer: it is the same job, not a second one."""
    ident = idempotency_key or uuid4().hex
    await app.producer.enqueue(JobRequest(JOB, payload, key=ident))
    response.headers["Location"] = f"/{JOB}/{ident}"
    return Accepted(id=ident)


async def job_state(ident: str, app: Opened) -> State:
    if (state := await _look(app, ident)) is None:
        raise HTTPException(404, f"no {JOB} with this id")
    return state


async def _look(app: App, ident: str) -> State | None:
    # The database first: Redis forgets finished jobs after a while, and failed ones move to the dead letters.
    ref = app.producer.ref(JobRequest(JOB, {}, key=ident))
    done = select(results.c.key).where(results.c.key == ident)
    waiting = dead_letters.c.replayed_at.is_(None)
    dead = select(dead_letters.c.id).where(dead_letters.c.job_id == ref.id, waiting)
    async with read(app.store) as connection:
        if (await connection.execute(done)).first():
            return State(id=ident, state="completed", percent=100.0)
        if (await connection.execute(dead)).first():
            return State(id=ident, state="failed")
    queue = app.producer.queue(ref.queue)
    async with app.producer.bounded():
        job = await queue.getJob(ref.id)
        if job is None:
            return None
        state = str(await queue.getJobState(ref.id))
    progress = job.progress if isinstance(job.progress, dict) else {}
    return State(
        id=ident,
        state=STATES.get(state, "waiting"),  # BullMQ has several words for waiting
        percent=progress.get("percent", 0.0),
        message=progress.get("message", ""),
    )
{@% if kind == 'async-flow' %@}


async def job_events(ident: str, app: Opened, request: Request) -> AsyncIterator[ServerSentEvent]:
    """Progress as server-sent events until the job ends. Whoever reconnects, to any instance, sees where it is."""
    news: ProgressStream = request.app.state.news
    ref = app.producer.ref(JobRequest(JOB, {}, key=ident))
    last = await _look(app, ident)
    if last is None:
        yield ServerSentEvent(event="unknown", data={"id": ident})
        return
    yield ServerSentEvent(event=last.state, data=last.model_dump())
    events = news.events(queues=[ref.queue], idle=QUIET)
    while last.state not in ENDED:
        event = await anext(events)
        if event.job_id not in (ref.id, ""):
            continue  # somebody else's; without an id: a quiet moment, or a gap
        try:
            state = await _look(app, ident) or last
        except QueueUnavailable:
            continue  # Redis is away for a moment: the stream goes on when it is back
        if state != last:
            last = state
            yield ServerSentEvent(event=last.state, data=last.model_dump())
{@% endif %@}


async def ready(app: Opened) -> JSONResponse:
    """503 while Redis or the database does not answer."""
    problems = await health.problems(app.producer.redis, app.store)
    return JSONResponse(dict(problems), status_code=503 if problems else 200)


async def metrics(request: Request, app: Opened) -> Response:
    """How the queues are, for Prometheus. Each worker serves its own jobs, see METRICS_PORT."""
    shown: JobMetrics = request.app.state.metrics
    async with app.producer.bounded():
        measured = await health.measure(app.producer.redis, app.store, app.jobs.queues)
    for queue in measured.queues:
        for state in ("backlog", "delayed", "active", "failed"):
            shown.depth.labels(queue.queue, state).set(getattr(queue, state))
        shown.oldest.labels(queue.queue).set(queue.oldest)
    return Response(shown.render(), media_type="text/plain; version=0.0.4")


async def _try_again(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=503, headers={"Retry-After": "2"})


async def _failed_before(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=409)

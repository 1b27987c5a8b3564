"""The console as its own ASGI app, and its parts for a service that has an app already."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import StoreUnavailable
from studyhall.patterns.producer import Producer

from . import actions, dead_letters, jobs, queues, records
from .gate import Gate
from .problems import Problem, install
from .queues import sampling
from .state import Console

STATIC = Path(__file__).with_name("static")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
VIEWS = ("overview", "jobs", "workers", "schedules")
STORED = {"letters": "dead_letters", "sagas": "saga", "outbox": "outbox"}  # view -> its table


def console(
    redis: str | Producer,
    *,
    token: str,
    database: str | Any | None = None,
    queues: Sequence[str] | None = None,
    prefix: str = "bull",
    hosts: Collection[str] = LOOPBACK,
    name: str = "BullMQ",
    adds: bool = True,
) -> FastAPI:
    """Mount it or serve it. Everything but its own files needs `token`; an empty token switches it off.

    A mounted app's lifespan is not run: `async with app.router.lifespan_context(app)` in the service's own fills the
    charts and closes what was opened. `redis` and `database` are URLs, or the service's open producer and store.
    `queues` limits it to these; without it every queue under `prefix` is found by its keys.
    """
    producer = redis if isinstance(redis, Producer) else Producer(redis, prefix=prefix)
    store = open_store(database) if isinstance(database, str) else database
    state = Console(producer, token, store, queues, adds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        samples = asyncio.create_task(sampling(state), name="charts")
        try:
            yield
        finally:
            samples.cancel()
            await state.tasks.drain(2.0)
            if producer is not redis:
                await producer.close()
            if store is not None and store is not database:
                await close(store)

    api = FastAPI(title=f"{name} console", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    install(api)
    include(api, state, name=name)
    api.add_middleware(Gate, hosts=hosts)
    return api


def include(
    api: FastAPI, state: Console | None, *, name: str, views: Sequence[str] = (), extra: str = "", live: bool = False
) -> None:
    """The endpoints under /admin and the page at /. `views` are the service's own, their scripts served at
    `extra`; `live`: it has an event stream at /admin/events. Without `state`, it sets `api.state.console` itself."""
    if state is not None:
        api.state.console = state
    for part in (queues, jobs, actions, dead_letters, records):
        api.include_router(part.router)

    @api.get("/console.json", include_in_schema=False)
    async def about() -> dict[str, Any]:
        console: Console = api.state.console
        try:
            tables = await console.tables()
        except StoreUnavailable:
            tables = frozenset(STORED.values())
        stored = [view for view, table in STORED.items() if table in tables]
        return {
            "name": name,
            "views": [*VIEWS, *stored],
            "extra": [f"{extra}/{view}.js" for view in views],
            "live": live,
            "cancels": "inbox" in tables,
            "token": console.token_name,
        }

    @api.api_route("/admin/{rest:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
    async def nowhere(rest: str) -> None:
        raise Problem(404, "not-found", "There is no such part of the console.")

    api.mount("/", StaticFiles(directory=STATIC, html=True), name="console")

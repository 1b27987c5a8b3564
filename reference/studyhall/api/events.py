"""Live events as Server-Sent Events. After a break the browser sends Last-Event-ID and misses nothing."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from queuesmith.console.state import Admin
from studyhall import db
from studyhall.jobs import STAGES
from studyhall.patterns.core.redaction import redact, redact_text
from studyhall.patterns.core.store import read
from studyhall.patterns.progress_stream import GAP, IDLE, JobEvent, sse

from .state import Api, Caller, Client, Streams

router = APIRouter(tags=["events"])
RETRY_MS = 1_000
HEARTBEAT = 10.0
SHOWN = frozenset(
    {"added", "waiting", "waiting-children", "active", "progress", "delayed", "completed", "failed", "stalled"}
)
LastId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=4_000)]
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "events, forever"},
    503: {"description": "too many event streams are open"},
}


class Streamed(StreamingResponse):
    """An event stream that counts as open until it ends, and ends at once when the process is told to stop."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], streams: Streams, client: str, status_code: int = 200) -> None:
        # FastAPI reads the default of `status_code` for its OpenAPI document.
        streams.open(client)
        self._streams, self._client = streams, client
        super().__init__(_until(events, streams.stopping), status_code)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.close(self._client)


async def _until(events: AsyncIterator[str], stop: asyncio.Event) -> AsyncIterator[str]:
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(events))
            try:
                await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                yield coming.result()
            except StopAsyncIteration:
                return
            finally:
                coming.cancel()
    finally:
        stopped.cancel()


@router.get("/events", response_class=Streamed, responses=STREAM)
async def my_events(
    api: Api,
    caller: Caller,
    client: Client,
    last_event_id: LastId = None,
    document: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="only this document's")] = None,
) -> Streamed:
    """Events of the caller's documents: stages that start, progress, ends."""
    owners: OrderedDict[str, bool] = OrderedDict()

    async def of_caller(event: JobEvent) -> bool:
        stage, _, ident = event.job_id.partition(".")
        if stage not in STAGES or (document is not None and ident != document):
            return False
        if ident not in owners:
            async with read(api.app.store) as connection:
                owners[ident] = await db.document(connection, ident, caller) is not None
            if len(owners) > 1_000:
                owners.popitem(last=False)
        return owners[ident]

    async def frames() -> AsyncIterator[str]:
        yield f"retry: {RETRY_MS}\n\n"
        async for event in api.stream.events(last_event_id, idle=HEARTBEAT):
            if event.name in (GAP, IDLE):
                yield _wire(event)
            elif event.name in SHOWN and await of_caller(event):
                yield _wire(event, document=event.job_id.partition(".")[2])

    return Streamed(frames(), api.streams, client)


@router.get("/admin/events", response_class=Streamed, responses=STREAM, tags=["admin"])
async def all_events(
    api: Api,
    _: Admin,
    client: Client,
    last_event_id: LastId = None,
    queue: Annotated[list[str] | None, Query(max_length=50, description="only these queues")] = None,
) -> Streamed:
    """Events of the queues, for all owners."""

    async def frames() -> AsyncIterator[str]:
        yield f"retry: {RETRY_MS}\n\n"
        async for event in api.stream.events(last_event_id, queues=queue, idle=HEARTBEAT):
            yield _wire(event)

    return Streamed(frames(), api.streams, client)


def _wire(event: JobEvent, **more: Any) -> str:
    if event.name == IDLE:
        return f"id: {event.cursor}\nevent: idle\ndata: {{}}\n\n"
    data: dict[str, Any] = {"queue": event.queue, "job_id": event.job_id, "at": event.at, **more}
    if event.name == "progress":
        data["progress"] = redact(event.progress)
    elif event.name == "failed":
        data["reason"] = redact_text(event.fields.get("failedReason", ""))
    elif event.name == "delayed":
        data["until"] = event.fields.get("delay")
    return sse(event.name or "message", data, event.cursor)

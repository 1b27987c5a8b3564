# [sse]
# events.py: app.include_router(router)
from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse

from patterns.progress_stream import sse

router = APIRouter()


@router.get("/events")
async def events(request: Request, last_event_id: str | None = Header(None)):
    async def lines():
        async for event in request.app.state.stream.events(last_event_id, queues=["ai"]):
            if event.name == "idle":
                yield ": still here\n\n"  # keeps proxies from closing the connection
            else:
                data = {"job": event.job_id, "progress": event.progress}  # no results, no reasons
                yield sse(event.name, data, event.cursor)

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


# [/sse]

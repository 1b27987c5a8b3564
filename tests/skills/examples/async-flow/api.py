# [api]
# api.py: answers at once; the work is a job, its end can be awaited or watched
import asyncio
import contextlib
import os

from fastapi import FastAPI, Header, HTTPException, Request

from patterns.core.open_store import close, create_all, open_store
from patterns.dead_letter import reason_of
from patterns.idempotency import result_of
from patterns.producer import JobRef, JobRequest, Producer, QueueUnavailable
from patterns.progress_stream import ProgressStream
from patterns.request_dedup import InvalidRequestKey, KeyReused, RequestDedup
from patterns.typed_jobs import validated
from patterns.wait_for_result import JobFailed, JobUnknown, Results, StillRunning
from summaries import Summarise, jobs


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI):
    url, app.state.store = os.environ["REDIS_URL"], open_store(os.environ["DATABASE_URL"])
    await create_all(app.state.store)
    app.state.producer = Producer(url, validated(jobs))
    app.state.stream = ProgressStream(url, jobs.queues)
    # What has left Redis is answered from the database.
    kept = {"stored": result_of(app.state.store), "failed": reason_of(app.state.store)}
    app.state.results = Results(app.state.stream, app.state.producer.redis, **kept)
    reading = asyncio.create_task(app.state.stream.run())  # held: one reader serves all clients
    yield
    reading.cancel()
    await app.state.producer.close()
    await close(app.state.store)


app = FastAPI(lifespan=lifespan)


@app.post("/summaries", status_code=202)
async def create(body: Summarise, request: Request, idempotency_key: str | None = Header(None)):
    async def work(ident: str) -> dict:  # the same ident for every repeat of this request
        ref = await request.app.state.producer.enqueue(JobRequest("summarise", body, key=ident))
        return {"key": ref.key, "job": ref.id}

    try:
        caller = "the user's id, from your authentication"
        dedup = RequestDedup(request.app.state.store, "summaries")
        return (await dedup.run(caller, idempotency_key, body.model_dump(), work)).value
    except (KeyReused, InvalidRequestKey) as error:
        raise HTTPException(422, str(error)) from error
    except QueueUnavailable as error:
        raise HTTPException(503, str(error), {"Retry-After": "5"}) from error


@app.get("/summaries/{key}")
async def result(key: str, request: Request, wait: float = 0):
    ref: JobRef = request.app.state.producer.ref(JobRequest("summarise", {}, key=key))
    try:
        return await request.app.state.results.wait(ref, timeout=min(wait, 10))
    except StillRunning:
        raise HTTPException(202, "still running, ask again", {"Retry-After": "2"}) from None
    except JobUnknown:
        raise HTTPException(404, "no such summary") from None
    except JobFailed:
        raise HTTPException(502, "the summary failed") from None  # the reason stays in the dead letters


# [/api]


async def example(redis_url: str, store_url: str) -> None:
    import httpx2 as httpx

    from patterns.bullmq_worker import ReliableWorker
    from patterns.idempotency.once import inboxes, once
    from patterns.pipeline import Pipeline
    from patterns.progress import reporting
    from patterns.typed_jobs import typed

    os.environ["DATABASE_URL"] = store_url
    async with lifespan(app):
        pipeline = Pipeline(typed(jobs), once(inboxes(app.state.store)), reporting())
        worker = ReliableWorker("ai", pipeline, url=redis_url)
        running = asyncio.create_task(worker.run())
        seen = []

        async def watch() -> None:
            async for event in app.state.stream.events(queues=["ai"]):
                seen.append(event.name)
                if event.name == "completed":
                    return

        await app.state.stream.ready()
        watching = asyncio.create_task(watch())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body, header = {"text": "one two three four five six"}, {"idempotency-key": "click-1"}
            answers = [(await client.post("/summaries", json=body, headers=header)).json() for _ in range(3)]
            assert answers[0] == answers[1] == answers[2], answers
            other = {"text": "another body under the same key"}
            assert (await client.post("/summaries", json=other, headers=header)).status_code == 422
            header = {"idempotency-key": "x" * 300}
            assert (await client.post("/summaries", json=body, headers=header)).status_code == 422
            done = await client.get(f"/summaries/{answers[0]['key']}?wait=10")
            assert done.json() == {"summary": "one two three four five"}, done.text
            assert (await client.get("/summaries/nobody?wait=0")).status_code in (202, 404)
        async with asyncio.timeout(10):
            await watching
        await first_event(app, body)
        assert "progress" in seen
        assert seen.count("completed") == 1
        await worker.drain(5)
        await running


async def first_event(app: FastAPI, body: dict) -> None:
    """The SSE route of events.py, called as the server would: one progress event in the wire format."""
    from events import events

    request = Request({"type": "http", "app": app, "headers": []})
    lines = (await events(request, last_event_id=None)).body_iterator
    waiting = asyncio.create_task(anext(lines))
    await asyncio.sleep(0.1)
    await app.state.producer.enqueue(JobRequest("summarise", body, key="watched"))
    async with asyncio.timeout(10):
        line = await waiting
    assert line.startswith(("id:", "event:")), line
    await lines.aclose()

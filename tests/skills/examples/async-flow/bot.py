# [bot]
import os

from fastapi import APIRouter, HTTPException, Request

from patterns.deferred_reply import PONG, DeferredReplies, NotSigned, Unreadable, parse, verify
from patterns.pipeline import JobContext
from patterns.producer import JobRequest
from patterns.core.clock import Periodic
from patterns.typed_jobs import JobTypes, Payload

router, jobs = APIRouter(), JobTypes()


class Ask(Payload):
    interaction: str  # the id; the token stays in the database
    question: str


@router.post("/interactions")
async def interactions(request: Request) -> dict:
    body, head = await request.body(), request.headers  # the raw bytes are what was signed
    try:
        stamp = head.get("x-signature-timestamp", "")
        verify(os.environ["PUBLIC_KEY"], head.get("x-signature-ed25519", ""), stamp, body)
        asked = parse(body)
    except (NotSigned, Unreadable) as error:
        raise HTTPException(401 if isinstance(error, NotSigned) else 400) from None
    if asked is None:
        return PONG
    question = Ask(interaction=asked.id, question=str(asked.options.get("question", "")))
    job = JobRequest("ask", question, key=asked.id, priority="critical", max_age=900)
    return await request.app.state.replies.accept(asked, lambda: request.app.state.producer.enqueue(job))


# What fails comes back until shortly before the token ends, and consumes no attempt.
@jobs.register(name="ask", payload=Ask, queue="chat", deadline=930)
async def ask(ctx: JobContext, payload: Ask) -> dict:
    async def work(seconds: float) -> str:
        return await ctx.services.model(payload.question, timeout=seconds, key=ctx.provider_key("model"))

    replies = DeferredReplies(ctx.store)
    return {"state": await replies.answer(payload.interaction, ctx.services.webhook, work)}


def beside_the_worker(replies: DeferredReplies, webhook) -> list[Periodic]:
    old = Periodic("old answers", lambda: replies.purge(older_than=86_400), every=3600)
    # Tells whoever still waits when the token is about to end.
    return [old, Periodic("late answers", lambda: replies.tell_late(webhook), every=2)]


# [/bot]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio
    import json
    import time
    from types import SimpleNamespace

    import httpx2 as httpx
    from fastapi import FastAPI
    from nacl.signing import SigningKey

    from patterns.core.open_store import close, create_all, open_store
    from patterns.bullmq_worker import ReliableWorker
    from patterns.idempotency.once import inboxes, once
    from patterns.pipeline import Pipeline
    from patterns.producer import Producer
    from patterns.typed_jobs import typed, validated

    key, edits, calls = SigningKey.generate(), [], []
    os.environ["PUBLIC_KEY"] = key.verify_key.encode().hex()

    class Webhook:
        async def edit(self, application_id: str, token: str, text: str) -> None:
            edits.append(text)

        async def follow_up(self, application_id: str, token: str, text: str) -> None:
            edits.append(text)

    async def model(question: str, timeout: float, key: str) -> str:
        calls.append(question)
        return f"42, for {question}"

    store, app = open_store(store_url), FastAPI()
    await create_all(store)
    app.include_router(router)
    app.state.replies, app.state.producer = DeferredReplies(store), Producer(redis_url, validated(jobs))
    body = json.dumps(
        {
            "id": "i1",
            "application_id": "a1",
            "type": 2,
            "token": "t1",
            "member": {"user": {"id": "u1"}},
            "data": {"name": "ask", "options": [{"name": "question", "value": "why"}]},
        }
    ).encode()
    stamp = str(int(time.time()))
    good = {"x-signature-timestamp": stamp, "x-signature-ed25519": key.sign(stamp.encode() + body).signature.hex()}
    services = SimpleNamespace(model=model, webhook=Webhook())
    worker = ReliableWorker("chat", Pipeline(typed(jobs), once(inboxes(store)), services=services), url=redis_url)
    running = asyncio.create_task(worker.run())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        assert (await client.post("/interactions", content=body + b" ", headers=good)).status_code == 401
        for _ in range(2):  # the platform delivers twice
            answer = await client.post("/interactions", content=body, headers=good)
            assert answer.json() == {"type": 5}, answer.text
    async with asyncio.timeout(20):
        while not edits:
            await asyncio.sleep(0.02)
    await worker.drain(5)
    await running
    assert (edits, calls) == (["42, for why"], ["why"])
    await app.state.producer.close()
    await close(store)

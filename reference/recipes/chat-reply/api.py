"""python api.py PORT: the platform POSTs /interactions, and is answered at once."""

import contextlib
import os
import sys

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import ValidationError

from jobs import job_of
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import ping
from patterns.deferred_reply import (
    PONG,
    DeferredReplies,
    NotSigned,
    Unreadable,
    received,
)
from patterns.producer import Producer


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI):
    app.state.store = store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    app.state.replies = DeferredReplies(store)
    app.state.producer = Producer(os.environ["REDIS_URL"])
    yield
    await app.state.producer.close()
    await close(store)


app = FastAPI(lifespan=lifespan)


@app.post("/interactions")
async def interactions(request: Request):
    body, key = await request.body(), os.environ["PUBLIC_KEY"]
    try:
        asked = received(key, request.headers, body)  # the raw body: what was signed
        if asked is None:
            return PONG
        job = job_of(asked)
    except NotSigned:
        raise HTTPException(401) from None
    except (Unreadable, ValidationError):
        raise HTTPException(400) from None
    producer = app.state.producer
    return await app.state.replies.accept(asked, lambda: producer.enqueue(job))


@app.get("/healthz")
async def healthz():
    await ping(app.state.store)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")

"""python api.py PORT: POST /webhook says 2xx when the delivery is on the disk."""

import contextlib
import json
import os
import sys

import uvicorn
from fastapi import FastAPI, HTTPException, Request

from jobs import KEY, QUEUE
from patterns import outbox
from patterns.core.event import Event
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import StoreUnavailable, begin, ping
from patterns.signed_http import NotSigned, verify

SECRETS = os.environ["SIGNING_SECRETS"].split()  # two while you rotate


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI):
    app.state.store = open_store(os.environ["DATABASE_URL"])
    await create_all(app.state.store)
    yield
    await close(app.state.store)


app = FastAPI(lifespan=lifespan)


@app.post("/webhook")
async def webhook(request: Request):
    head = request.headers
    if not 0 < int(head.get("content-length", 0)) <= 200_000:
        raise HTTPException(413)
    body = await request.body()  # raw: what was signed
    try:
        verify(SECRETS, head.get("signature", ""), body)
        data = json.loads(body)
        key = str(data[KEY])
        if data[KEY] in (None, ""):
            raise ValueError(KEY)
        names = {"id": f"{QUEUE}.{key}", "type": f"{QUEUE}.taken.v1"}
        event = Event(**names, source="/webhook", subject=key, data=data)
    except NotSigned:
        raise HTTPException(401) from None
    except (ValueError, LookupError, TypeError):
        raise HTTPException(400) from None
    try:
        async with begin(app.state.store, durable=True) as tx:
            await outbox.add(tx, event, to=[QUEUE])  # a duplicate adds nothing
    except StoreUnavailable:  # away or busy: the sender retries
        raise HTTPException(503, headers={"Retry-After": "5"}) from None


@app.get("/healthz")
async def healthz():
    await ping(app.state.store)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")

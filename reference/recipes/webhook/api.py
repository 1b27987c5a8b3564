"""python api.py PORT: POST /webhook says 2xx once the delivery is in the database."""

import contextlib
import hashlib
import hmac
import json
import os
import sys
import time

import uvicorn
from fastapi import FastAPI, HTTPException, Request

from jobs import KEY, QUEUE
from patterns import outbox
from patterns.core.event import Event
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import begin, ping
from patterns.fan_out import destination_of

SECRETS = os.environ["SIGNING_SECRETS"].split()  # two of them while you change it


def check(header: str, body: bytes):
    """Stripe's scheme: `t=…,v1=…`, HMAC-SHA256 of time, dot and raw body."""
    parts = [part.strip().partition("=")[::2] for part in header.split(",")]
    at, said = dict(parts).get("t", ""), [mac for name, mac in parts if name == "v1"]
    for secret in SECRETS if at.isdecimal() and abs(time.time() - int(at)) < 300 else []:
        mac = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256)
        if any(hmac.compare_digest(mac.hexdigest().encode(), one.encode()) for one in said):
            return
    raise HTTPException(401)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI):
    app.state.store = open_store(os.environ["DATABASE_URL"])
    await create_all(app.state.store)
    yield
    await close(app.state.store)


app = FastAPI(lifespan=lifespan)


@app.post("/webhook")
async def webhook(request: Request):
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > 200_000:
            raise HTTPException(413)
    check(request.headers.get("Signature", ""), body)
    try:
        data = json.loads(body)
        key, kind = str(data[KEY]), f"{QUEUE}.taken.v1"
        event = Event(id=f"{QUEUE}.{key}", type=kind, source="/", subject=key, data=data)
    except (ValueError, LookupError, TypeError):
        raise HTTPException(400) from None
    # On the disk before the answer. A duplicate adds nothing; Redis is not asked.
    async with begin(app.state.store, durable=True) as tx:
        await outbox.add(tx, event, to=[destination_of(QUEUE)])


@app.get("/healthz")
async def healthz():
    await ping(app.state.store)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")

"""Duplicates, and jobs that somebody else put on the queue. prove.toml tests crashes."""

from __future__ import annotations

import redis
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from {@ package @}.db import {@ job_name @}_results as results
from {@ package @}.jobs import job_types
from {@ package @}.patterns.core.open_store import close, open_store
from {@ package @}.patterns.core.request import JobRequest
from {@ package @}.patterns.core.store import read
from {@ package @}.patterns.engine import ensure_redis
from {@ package @}.patterns.producer import Producer
from {@ package @}.patterns.signed_payload import Signer, signing
from {@ package @}.patterns.typed_jobs import validated
from {@ package @}.settings import Settings

from .example import BODY, URL
from .processes import Processes, until


async def effects(settings: Settings, ident: str) -> int:
    store = open_store(settings.store_url)
    try:
        async with read(store) as connection:
            counted = select(func.count()).where(results.c.key == ident)
            return int(await connection.scalar(counted) or 0)
    finally:
        await close(store)


async def test_a_job_that_is_delivered_again_after_its_end_takes_no_second_effect(
    api: TestClient, processes: Processes, settings: Settings
) -> None:
    processes.start("-m", "{@ package @}", "worker")
    key = {"Idempotency-Key": "delivered-twice"}
    ident = api.post(URL, json=BODY, headers=key).json()["id"]
    until(lambda: api.get(f"{URL}/{ident}").json()["state"] == "completed", "completed job")
    server = ensure_redis(settings.data_dir)
    client = redis.Redis.from_url(server.url, decode_responses=True)
    client.flushall()  # Redis has forgotten everything; the client asks again
    assert api.post(URL, json=BODY, headers=key).json()["id"] == ident
    until(lambda: client.zcard("bull:work:completed"), "second run")
    assert await effects(settings, ident) == 1
    client.close()
    server.stop()


async def test_a_forged_job_never_runs(api: TestClient, processes: Processes, settings: Settings) -> None:
    server = ensure_redis(settings.data_dir)
    steps = [validated(job_types())]
    unsigned = Producer(server.url, *steps)
    forged = Producer(server.url, *steps, signing(Signer(["somebody else's key"])))
    idents = ["0" * 32, "1" * 32]
    for producer, ident in zip((unsigned, forged), idents, strict=True):
        await producer.enqueue(JobRequest(URL.strip("/"), BODY, key=ident))
        await producer.close()
    honest = api.post(URL, json=BODY).json()["id"]
    processes.start("-m", "{@ package @}", "worker")
    for ident, state in {**dict.fromkeys(idents, "failed"), honest: "completed"}.items():
        until(lambda: api.get(f"{URL}/{ident}").json()["state"] == state, f"{state} job")  # noqa: B023
    assert [await effects(settings, ident) for ident in [*idents, honest]] == [0, 0, 1]
    server.stop()

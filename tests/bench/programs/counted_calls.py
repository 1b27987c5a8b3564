"""Prints how many Python and C functions are called for one job: added alone, added in bulk, and executed (in the
thread of the event loop) with every step on. Usage: counted_calls.py REDIS_URL STORE_URL"""

import asyncio
import cProfile
import json
import os
import pstats
import sys

import uvloop

from harness.pipelines import KEYS, full_pipeline, full_producer
from harness.workers import at_work
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.observability import configure_logging
from studyhall.patterns.pipeline import JobContext
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload

WARM, COUNTED = 50, 250


class Number(Payload):
    n: int
    text: str = ""


class Counter:
    """Starts counting at job WARM, and is done with job WARM + COUNTED."""

    def __init__(self) -> None:
        self.profile, self.jobs, self.done = cProfile.Profile(), 0, asyncio.Event()

    async def handle(self, ctx: JobContext, payload: Number) -> dict[str, int]:
        self.jobs += 1
        if self.jobs == WARM:
            self.profile.enable()
        elif self.jobs == WARM + COUNTED:
            self.profile.disable()
            self.done.set()
        return {"n": payload.n}


def per_job(profile: cProfile.Profile) -> float:
    return round(pstats.Stats(profile).total_calls / COUNTED, 1)  # type: ignore[attr-defined]


def requests(first: int, count: int) -> list[JobRequest]:
    return [JobRequest("number", {"n": n}, key=f"n-{n}") for n in range(first, first + count)]


async def main(redis: str, url: str) -> None:
    configure_logging("INFO", open(os.devnull, "w"))  # noqa: SIM115
    store, counter, jobs, found = open_store(url), Counter(), JobTypes(), {}
    await create_all(store)
    jobs.register(name="number", payload=Number, handler=counter.handle, queue="numbers")
    producer = full_producer(jobs, redis, signer=Signer(KEYS), timeout=30)
    await producer.enqueue_many(requests(0, WARM))
    with cProfile.Profile() as single:
        for request in requests(WARM, COUNTED):
            await producer.enqueue(request)
    await producer.redis.flushall()
    with cProfile.Profile() as bulk:
        await producer.enqueue_many(requests(0, COUNTED))
    await producer.enqueue_many(requests(COUNTED, 2 * WARM))
    pipeline = full_pipeline(jobs, store, signer=Signer(KEYS))
    async with at_work("numbers", pipeline, url=redis, concurrency=50), asyncio.timeout(60):
        await counter.done.wait()
    await producer.close()
    found = {"enqueue": single, "enqueue_many": bulk, "execute": counter.profile}
    print(json.dumps({name: per_job(profile) for name, profile in found.items()}))


uvloop.run(main(*sys.argv[1:]))
os._exit(0)  # the threads of the store

"""How late scheduled jobs start: one tick a second, declared with the schedule pattern and run by its worker.

Lateness is the start of the handler minus the slot of its tick, on the machine's clock. BullMQ's own Python
worker runs a scheduler of the same interval beside it in the same seconds.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import redis
import uvloop
from bullmq import Job, Queue, Worker

from bench.figures import Column, Value, percentile
from bench.lab import Lab
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.idempotency.once import inboxes, once
from studyhall.patterns.observability import logged
from studyhall.patterns.pipeline import JobContext, Pipeline
from studyhall.patterns.producer import Producer
from studyhall.patterns.schedule import Schedule, Schedules, signing_id, ticking
from studyhall.patterns.schedule.slots import tick_of
from studyhall.patterns.signed_payload import Signer, signed, signing
from studyhall.patterns.typed_jobs import JobTypes, Payload, typed, validated

EVERY = 1.0
KEYS = ["a-signing-key-for-the-benchmark"]

TITLE = "Lateness of scheduled jobs"
ABOUT = (
    f"One tick every {EVERY:g} s; lateness is the start of the handler minus the slot of its tick. The schedule "
    "pattern with the full pipeline, and a scheduler of BullMQ's own Python worker, in the same seconds."
)
COLUMNS = {
    "ticks": Column("ticks", better=""),
    "p50": Column("late p50", "ms", better="less"),
    "p95": Column("p95", "ms", better="less"),
    "p99": Column("p99", "ms", better="less"),
    "most": Column("most", "ms", better="less"),
}
ROUNDS = 1


class Nothing(Payload):
    pass


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    return run(lab.url, seconds=lab.scale(20, 60))


def run(url: str, *, seconds: float) -> dict[str, dict[str, Value]]:
    """On an empty Redis; leaves it empty."""
    with redis.Redis.from_url(url, socket_timeout=60) as client:
        client.flushall()
        late = uvloop.run(_both(url, seconds))
        client.flushall()
    return {name: _summary(times) for name, times in late.items()}


async def _both(url: str, seconds: float) -> dict[str, list[float]]:
    late: dict[str, list[float]] = {"queuesmith": [], "stock": []}
    async with _ours(url, late["queuesmith"]), _stock(url, late["stock"]):
        await asyncio.sleep(EVERY)  # both are at work
        for times in late.values():
            times.clear()
        await asyncio.sleep(seconds)
    return late


@contextlib.asynccontextmanager
async def _ours(url: str, late: list[float]) -> AsyncIterator[None]:
    async def tick(ctx: JobContext, payload: Nothing) -> None:
        slot = tick_of(ctx.job_id, ctx.job.data)
        assert slot is not None
        late.append(time.time() * 1000 - slot.slot)

    jobs = JobTypes()
    jobs.register(name="tick", payload=Nothing, handler=tick, queue="ticks")
    schedules = Schedules(jobs, [Schedule("every-second", "tick", every=EVERY)], sign=Signer(KEYS).sign)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder).resolve()}/ticks.db")
        await create_all(store)
        producer = Producer(url, validated(jobs), signing(Signer(KEYS)), timeout=10)
        steps = (signed(Signer(KEYS), signing_id), typed(jobs), ticking(schedules, store), once(inboxes(store)))
        pipeline = Pipeline(logged(), *steps)
        worker = ReliableWorker("ticks", pipeline, url=url)
        running = asyncio.create_task(worker.run())
        try:
            await worker.ready()
            await schedules.apply(producer, store)
            yield
        finally:
            await worker.drain(5)
            await running
            await producer.close()
            await close(store)


@contextlib.asynccontextmanager
async def _stock(url: str, late: list[float]) -> AsyncIterator[None]:
    async def tick(job: Job, token: str) -> None:
        late.append(time.time() * 1000 - int(str(job.id).rpartition(":")[2]))

    queue = Queue("stock-ticks", {"connection": url})
    worker = Worker("stock-ticks", tick, {"connection": url, "autorun": False})
    running = asyncio.create_task(worker.run())
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it leaves exceptions unretrieved
    try:
        await queue.upsertJobScheduler("every-second", {"every": int(EVERY * 1000)}, "tick", {}, {})
        yield
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(worker.close(force=True), 5)
        running.cancel()
        await asyncio.wait({running}, timeout=5)
        await queue.close()


def _summary(times: Sequence[float]) -> dict[str, Value]:
    def late(percent: float) -> float | None:
        return round(percentile(times, percent), 1) if times else None

    return {"ticks": len(times), "p50": late(50), "p95": late(95), "p99": late(99), "most": late(100)}

"""How late scheduled jobs start: one tick a second, declared with the schedule pattern and run by its worker.

Lateness is the start of the handler minus the slot of its tick, on the machine's clock. BullMQ's own Python
worker runs a scheduler of the same interval beside it in the same seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import redis
from bullmq import Job, Queue, Worker

from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.pipeline import JobContext, Pipeline
from studyhall.patterns.producer import Producer
from studyhall.patterns.schedule import Schedule, Schedules
from studyhall.patterns.schedule_slots import tick_of
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.store import close, create_all, open_store
from studyhall.patterns.typed_jobs import JobTypes, Payload

__all__ = ["measure", "table"]

EVERY = 1.0
KEYS = ["a-signing-key-for-the-benchmark"]


class Nothing(Payload):
    pass


def measure(url: str, *, seconds: float = 20) -> dict[str, Any]:
    """Run on a Redis of its own: it is flushed."""
    with redis.Redis.from_url(url, socket_timeout=60) as client:
        client.flushall()
        late = asyncio.run(_both(url, seconds))
        client.flushall()
    return {
        "seconds": seconds,
        "every": EVERY,
        **{name: _summary(times, seconds) for name, times in late.items()},
    }


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"| one tick every {figures['every']:g} s for {figures['seconds']:g} s "
        "| ticks | p50 late ms | p95 | p99 | most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for key, name in (("ours", "schedule pattern, full pipeline"), ("stock", "stock bullmq-Python worker")):
        one = figures[key]
        lines.append(
            f"| {name} | {one['ticks']} | "
            + " | ".join(
                "–" if one[which] is None else f"{one[which]:.0f}" for which in ("p50", "p95", "p99", "most")
            )
            + " |"
        )
    return "\n".join(lines)


async def _both(url: str, seconds: float) -> dict[str, list[float]]:
    late: dict[str, list[float]] = {"ours": [], "stock": []}
    async with _ours(url, late["ours"]), _stock(url, late["stock"]):
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
    schedules = Schedules(jobs, [Schedule("every-second", "tick", every=EVERY)])
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder).resolve()}/ticks.db")
        await create_all(store)
        producer = Producer(jobs, url, signer=Signer(KEYS), timeout=10)
        pipeline = Pipeline(jobs, store, signer=Signer(KEYS), guards=[schedules.guard])
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


def _summary(times: Sequence[float], seconds: float) -> dict[str, Any]:
    ordered = sorted(times)

    def at(share: float) -> float | None:
        return round(ordered[math.ceil(share * len(ordered)) - 1], 1) if ordered else None

    return {
        "ticks": len(ordered),
        "expected": int(seconds / EVERY),
        "p50": at(0.5),
        "p95": at(0.95),
        "p99": at(0.99),
        "most": at(1.0),
    }

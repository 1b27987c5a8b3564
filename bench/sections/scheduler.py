"""How late scheduled jobs start, by our schedule and by BullMQ's own scheduler side by side."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import redis
import uvloop
from bullmq import Job

from bench.figures import Column, Value, less, percentile
from bench.lab import Lab
from harness.pipelines import KEYS, JobSetup
from harness.workers import queue_at, stock_at_work
from studyhall.patterns.pipeline import JobContext
from studyhall.patterns.schedule import Schedule, Schedules, ticking
from studyhall.patterns.schedule.slots import tick_of
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload

EVERY = 1.0

TITLE = "Lateness of scheduled jobs"
ABOUT = (
    f"One tick every {EVERY:g} s; lateness is the start of the handler minus the slot of its tick. The schedule "
    "pattern with the full pipeline, and a scheduler of BullMQ's own Python worker, in the same seconds."
)
COLUMNS = {
    "ticks": Column("ticks", better=""),
    "p50": less("late p50", "ms"),
    "p95": less("p95", "ms"),
    "p99": less("p99", "ms"),
    "most": less("most", "ms"),
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
        async with (
            JobSetup.open(url, Path(folder), jobs, signer=Signer(KEYS)) as setup,
            setup.working(steps=[ticking(schedules, setup.store)]),
        ):
            await schedules.apply(setup.producer, setup.store)
            yield


@contextlib.asynccontextmanager
async def _stock(url: str, late: list[float]) -> AsyncIterator[None]:
    async def tick(job: Job, token: str) -> None:
        late.append(time.time() * 1000 - int(str(job.id).rpartition(":")[2]))

    async with queue_at(url, "stock-ticks") as queue, stock_at_work("stock-ticks", tick, connection=url):
        await queue.upsertJobScheduler("every-second", {"every": int(EVERY * 1000)}, "tick", {}, {})
        yield


def _summary(times: Sequence[float]) -> dict[str, Value]:
    def late(percent: float) -> float | None:
        return round(percentile(times, percent), 1) if times else None

    return {"ticks": len(times), "p50": late(50), "p95": late(95), "p99": late(99), "most": late(100)}

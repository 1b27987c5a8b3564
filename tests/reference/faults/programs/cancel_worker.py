"""A worker whose jobs are cancelled from the test's process. `--naive`: a flag, an exception, BullMQ's retries."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from sqlalchemy import Column, Integer, String, Table, insert

from harness.pipelines import full_pipeline
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.cancel import CancelWatcher
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.job import RetryPolicy, stop_reason
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.core.store import begin, metadata
from studyhall.patterns.pipeline import Done
from studyhall.patterns.shutdown import run_until_signalled
from studyhall.patterns.typed_jobs import JobTypes, Payload

QUEUE = "work"
POLICY = RetryPolicy(base=0.05, cap=0.2, attempts=3)

effects = Table(
    "cancel_effects", metadata, Column("id", Integer, primary_key=True), Column("job", String(100), nullable=False)
)


class Work(Payload):
    seconds: float = 0.0
    seat: str = ""  # a file outside the database: taken first, released when cancelled


def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)


async def work(ctx, payload: Work):
    say("start", job=ctx.job_id)
    seat = Path(payload.seat) if payload.seat else None
    if seat:
        seat.write_text(ctx.job_id)
    try:
        await asyncio.sleep(payload.seconds)
    except asyncio.CancelledError as stopped:
        if seat and stop_reason(stopped):  # not when the worker drains: then the work goes on elsewhere
            seat.unlink()
        raise

    async def save(tx):
        await tx.execute(insert(effects).values(job=ctx.job_id))

    return Done({"done": ctx.job_id}, save)


def job_types():
    jobs = JobTypes()
    for name in ("step-one", "step-two", "step-three"):
        jobs.register(name=name, payload=Work, handler=work, queue=QUEUE, retry=POLICY)
    return jobs


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--naive", action="store_true")
    args = parser.parse_args()
    store, redis = open_store(args.store), producer_client(args.redis)
    await create_all(store)
    pipeline = full_pipeline(job_types(), store)

    async def naive(job, token):
        """The flag is read between the steps and removed, and an exception ends the run."""
        say("start", job=job.id)
        for _ in range(20):
            await asyncio.sleep(job.data["payload"]["seconds"] / 20)
            if await redis.getdel(f"cancel:{job.id}"):
                raise RuntimeError("cancelled")
        async with begin(store) as tx:
            await tx.execute(insert(effects).values(job=job.id))

    processor = naive if args.naive else pipeline
    worker = ReliableWorker(QUEUE, processor, url=args.redis, lock_duration=1.0, stalled_interval=0.3)

    async def ready():
        await worker.ready()
        say("ready")

    parts = [worker] if args.naive else [worker, CancelWatcher(redis, [worker], every=0.1)]
    await run_until_signalled(parts, grace=1, on_ready=ready)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

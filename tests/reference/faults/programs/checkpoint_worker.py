"""Imports rows batch by batch, with checkpoints or (--naive) from the start each time."""

import argparse
import asyncio
import json
import logging
import os

import uvloop
from sqlalchemy import Column, Integer, Table

from harness.pipelines import full_pipeline
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.checkpoint import Overtaken
from studyhall.patterns.core.job import Deadline
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import begin, metadata
from studyhall.patterns.observability import configure_logging
from studyhall.patterns.pipeline import Done
from studyhall.patterns.shutdown import run_until_signalled
from studyhall.patterns.typed_jobs import JobTypes, Payload

QUEUE = "imports"
# Rows worked on (even if lost afterwards), and rows kept. No unique constraint hides a duplicate.
worked = Table("worked", metadata, Column("id", Integer, primary_key=True), Column("row", Integer))
kept = Table("kept", metadata, Column("id", Integer, primary_key=True), Column("row", Integer))


class Import(Payload):
    rows: int
    batch: int
    pause: float = 0.0  # seconds of work per batch
    naive: bool = False


def say(event, **fields):
    print(json.dumps({"event": event, "pid": os.getpid(), **fields}), flush=True)


async def import_rows(ctx, payload: Import):
    start = 0 if payload.naive else (ctx.checkpointed or {"next": 0})["next"]
    say("run", start=start)
    for first in range(start, payload.rows, payload.batch):
        rows = range(first, min(first + payload.batch, payload.rows))
        async with begin(ctx.store) as tx:
            await tx.execute(worked.insert(), [{"row": row} for row in rows])
        say("batch", first=first)
        await asyncio.sleep(payload.pause)

        async def save(tx, rows=rows):
            await tx.execute(kept.insert(), [{"row": row} for row in rows])

        if payload.naive:
            async with begin(ctx.store) as tx:
                await save(tx)
        else:
            # Shielded, as if a thread did it: the worker's cancellation of a run that lost its lock comes too late.
            saving = asyncio.ensure_future(_save(ctx, rows, save))
            await asyncio.shield(saving)
    return Done({"rows": payload.rows})


async def _save(ctx, rows, save):
    try:
        await ctx.checkpoint({"next": rows.stop}, save)
    except Overtaken:
        say("overtaken", first=rows.start)
        raise


def job_types():
    jobs = JobTypes()
    jobs.register(name="import", payload=Import, handler=import_rows, queue=QUEUE, deadline=Deadline(600))
    return jobs


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--lock", type=float, default=1.5)
    options = parser.parse_args()
    configure_logging("INFO")
    logging.getLogger("jobs").setLevel("INFO")
    store = open_store(options.store)
    worker = ReliableWorker(
        QUEUE, full_pipeline(job_types(), store), url=options.redis, lock_duration=options.lock, stalled_interval=0.3
    )
    worker.on("lost", lambda job: say("lost", job=job.id))

    async def ready():
        await worker.ready()
        say("ready")

    await run_until_signalled([worker], grace=5, on_ready=ready)
    await close(store)


if __name__ == "__main__":
    uvloop.run(main())

"""python worker.py: imports CSV files row by row, until SIGTERM."""

import asyncio
import csv
import json
import os
from functools import partial
from itertools import islice
from pathlib import Path

from sqlalchemy import Column, Integer, Table, Text, insert

from jobs import QUEUE, Task, key_of, path_of
from patterns.bullmq_worker import ReliableWorker
from patterns.checkpoint import checkpointed
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import metadata
from patterns.dead_letter.sweeping import sweeping
from patterns.deadline import within_deadline
from patterns.idempotency.once import inboxes, once
from patterns.observability import configure_logging, logged
from patterns.pipeline import Done, JobContext, Pipeline
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import plain

BATCH = int(os.environ.get("BATCH", "100"))  # rows per transaction
imported = Table(
    "imported",
    metadata,
    Column("key", Text, primary_key=True),
    Column("line", Integer, primary_key=True),
    Column("data", Text, nullable=False),
    Column("rejected", Text),  # the reason
)


def read(path: Path, after: int):
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, strict=True)
        yield from ((rows.line_num, row) for row in rows if rows.line_num > after)


def checked(row: dict) -> dict:
    bad = None in row or None in row.values()  # your rules
    return {"data": json.dumps(row), "rejected": "columns" if bad else None}


async def handle(ctx: JobContext, task: Task) -> Done:
    done = ctx.checkpointed or 0  # the last line committed
    source = read(path_of(task), done)
    while batch := await asyncio.to_thread(list, islice(source, BATCH)):
        done = batch[-1][0]
        # One transaction: these rows, and where the next run begins.
        await ctx.checkpoint(done, partial(save, ctx.key, batch))
    return Done({"lines": done})


async def save(key: str, batch: list, tx):
    rows = [{"key": key, "line": n, **checked(row)} for n, row in batch]
    await tx.execute(insert(imported), rows)


async def main():
    configure_logging()
    url = os.environ["REDIS_URL"]
    store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    pipeline = Pipeline(
        logged(),
        plain(Task, handle, key=key_of, deadline=6 * 3600),
        crash_budget(5),
        once(inboxes(store)),
        within_deadline(),
        checkpointed(store),
    )
    worker = ReliableWorker(QUEUE, pipeline, url=url, concurrency=4)
    await run_until_signalled([worker, sweeping([QUEUE], store, url)], grace=25)
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())

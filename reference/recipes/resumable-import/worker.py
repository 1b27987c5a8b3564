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
)
rejected = Table(
    "rejected",
    metadata,
    Column("key", Text, primary_key=True),
    Column("line", Integer, primary_key=True),
    Column("reason", Text, nullable=False),
)


def read(path: Path, skip: int):
    """Rows behind the first `skip`: the number, the line in the file, the row."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        for number, row in enumerate(rows, 1):
            if number > skip:
                yield number, rows.line_num, row


def wrong_with(row: dict) -> str | None:
    """Your rules. A row that breaks one is listed in `rejected`, and the import goes on."""
    if None in row or None in row.values():
        return "more or fewer columns than the first line"
    return None


async def handle(ctx: JobContext, task: Task) -> Done:
    done = ctx.checkpointed or 0  # rows that earlier runs committed
    source = read(path_of(task), done)
    while batch := await asyncio.to_thread(list, islice(source, BATCH)):
        done = batch[-1][0]
        # One transaction: these rows, and that the next run begins behind them.
        await ctx.checkpoint(done, partial(save, ctx.key, batch))
    return Done({"rows": done})


async def save(key: str, batch: list, tx):
    good, bad = [], []
    for _, line, row in batch:
        if why := wrong_with(row):
            bad.append({"key": key, "line": line, "reason": why})
        else:
            good.append({"key": key, "line": line, "data": json.dumps(row)})
    for table, rows in ((imported, good), (rejected, bad)):
        if rows:
            await tx.execute(insert(table), rows)


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

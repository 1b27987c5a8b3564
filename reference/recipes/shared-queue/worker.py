"""python worker.py: does what others send, until SIGTERM."""

import asyncio
import json
import os

from sqlalchemy import Column, Table, Text, insert

from jobs import QUEUE, Task, key_of
from patterns.bullmq_worker import ReliableWorker
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import metadata
from patterns.dead_letter.sweeping import sweeping
from patterns.deadline import within_deadline
from patterns.idempotency.once import inboxes, once
from patterns.observability import configure_logging, logged
from patterns.pipeline import Done, JobContext, Pipeline
from patterns.retry import surviving
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import plain

key = Column("key", Text, primary_key=True)
results = Table("results", metadata, key, Column("task", Text, nullable=False))


async def handle(ctx: JobContext, task: Task) -> Done:
    # The slow part goes here: its failure is a retry, and nothing is locked meanwhile.
    text = json.dumps(task.model_dump())

    async def save(tx):  # commits with the marker that stops a second run
        await tx.execute(insert(results).values(key=ctx.key, task=text))

    return Done({"key": ctx.key}, save)


async def main():
    configure_logging()
    url = os.environ["REDIS_URL"]
    store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    pipeline = Pipeline(
        logged(),
        plain(Task, handle, key=key_of, retry=surviving(3600), deadline=60),
        crash_budget(5),
        once(inboxes(store)),
        within_deadline(),
    )
    worker = ReliableWorker(QUEUE, pipeline, url=url, concurrency=20)
    await run_until_signalled([worker, sweeping([QUEUE], store, url)], grace=25)
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())

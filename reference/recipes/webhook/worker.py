"""python worker.py: works until SIGTERM; start as many as you like."""

import asyncio
import os

from bullmq import Queue
from sqlalchemy import Column, Table, Text, insert

from jobs import KEY, QUEUE, Task
from patterns.bullmq_worker import ReliableWorker
from patterns.core.connections import producer_client
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import metadata
from patterns.dead_letter.sweeping import sweeping
from patterns.deadline import within_deadline
from patterns.fan_out import QueuePublisher, event_job
from patterns.idempotency.once import inboxes, once
from patterns.observability import configure_logging, logged
from patterns.outbox.relay import Relay
from patterns.pipeline import Done, JobContext, Pipeline
from patterns.retry import surviving
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import plain

results = Table("results", metadata, Column("key", Text), Column("body", Text))


async def handle(ctx: JobContext, task: Task) -> Done:
    # Slow work here; calls outside carry ctx.provider_key("step").
    async def save(tx):  # one transaction with the marker: once
        row = {"key": ctx.key, "body": task.model_dump_json()}
        await tx.execute(insert(results).values(row))

    return Done(save=save)


def key_of(task: Task) -> str:
    return str(getattr(task, KEY))


def job(queue, event):
    return {**event_job(queue, event), "name": "task", "data": event.data}


async def main():
    configure_logging()
    url, store = os.environ["REDIS_URL"], open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    pipeline = Pipeline(
        logged(),
        plain(Task, handle, key=key_of, retry=surviving(3600)),
        crash_budget(3),
        once(inboxes(store)),
        within_deadline(),
    )
    queue = QueuePublisher(Queue(QUEUE, {"connection": producer_client(url)}), job)
    relay = Relay(store, queue, destination=QUEUE, lease=10)
    worker = ReliableWorker(QUEUE, pipeline, url=url, concurrency=20)
    parts = [relay, worker, sweeping([QUEUE], store, url)]
    await run_until_signalled(parts, grace=25)
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())

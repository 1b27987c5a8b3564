"""python worker.py: works until SIGTERM; start as many as you like."""

import asyncio
import os
from zoneinfo import ZoneInfo

from sqlalchemy import Column, Table, Text, insert

from jobs import QUEUE, Task
from patterns.bullmq_worker import ReliableWorker
from patterns.core.execution import needs
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import metadata
from patterns.dead_letter.sweeping import sweeping
from patterns.deadline import within_deadline
from patterns.idempotency.once import inboxes, once
from patterns.observability import configure_logging, logged
from patterns.pipeline import Done, JobContext, Pipeline
from patterns.producer import Producer
from patterns.retry import surviving
from patterns.schedule import Schedule, ScheduleKeeper, Schedules, ticking
from patterns.schedule.slots import tick_of
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import JobTypes, plain, typed

CRON = os.environ.get("CRON", "0 2 * * *")
ZONE = os.environ.get("ZONE", "UTC")  # or Europe/Berlin
results = Table("results", metadata, Column("key", Text), Column("body", Text))


async def handle(ctx: JobContext, task: Task) -> Done:
    # The work here; calls outside carry ctx.provider_key("step").
    async def save(tx):  # one transaction with the marker: once
        row = {"key": ctx.key, "body": task.model_dump_json()}
        await tx.execute(insert(results).values(row))

    return Done(save=save)


RULES = {"retry": surviving(3600), "deadline": 3600.0}  # of one run
jobs = JobTypes()
jobs.register(name=QUEUE, payload=Task, handler=handle, queue=QUEUE, **RULES)
INPUT = '{"date": "0", "pages": 1}'  # "0": replaced by the slot's day, see below
payload = Task.model_validate_json(INPUT)
nightly = Schedule("nightly", QUEUE, cron=CRON, tz=ZONE, payload=payload)
# Raise the version with every change.
schedules = Schedules(jobs, [nightly], owner=QUEUE, version=1)


@needs("payload")
async def dated(run: JobContext, call_next):
    """Keyed by the slot's day: a run by the clock and one by hand are the same."""
    if tick := tick_of(run.job_id, run.job.data):
        day = f"{tick.at.astimezone(ZoneInfo(ZONE)):%Y%m%d}"
        fields = {**run.body, "date": day}
        run.payload = Task.model_validate(fields)
    run.key = str(run.payload.date)
    # Compared with that day too, not with the clock's "0".
    run.body, run.mark = run.payload.model_dump(mode="json"), ""
    return await call_next(run)


async def main():
    configure_logging()
    url, store = os.environ["REDIS_URL"], open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    producer = Producer(url)
    pipeline = Pipeline(
        logged(),
        typed(jobs, plain(Task, handle, **RULES)),
        dated,
        crash_budget(3),
        ticking(schedules, store),
        once(inboxes(store)),
        within_deadline(),
    )
    parts = [
        ReliableWorker(QUEUE, pipeline, url=url, concurrency=2),
        ScheduleKeeper(schedules, producer, store),
        sweeping([QUEUE], store, url),
    ]
    await run_until_signalled(parts, grace=25)
    await producer.close()
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())

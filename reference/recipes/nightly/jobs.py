"""The work of one date, and the clock that starts it."""

import os

from sqlalchemy import Column, Table, Text, insert

from patterns.core.store import metadata
from patterns.pipeline import Done, JobContext
from patterns.retry import surviving
from patterns.schedule import Schedule, Schedules
from patterns.typed_jobs import JobTypes, Payload

QUEUE = "reports"
CRON = os.environ.get("CRON", "0 2 * * *")
ZONE = "UTC"  # or Europe/Berlin: a time that summer time skips runs an hour later
results = Table("results", metadata, Column("key", Text), Column("body", Text))
jobs = JobTypes()


class Task(Payload):
    date: str
    pages: int


# Tried for an hour, each time for at most an hour.
@jobs.register(
    name="task", payload=Task, queue=QUEUE, retry=surviving(3600), deadline=3600.0
)
async def handle(ctx: JobContext, task: Task) -> Done:
    # The work here; calls outside carry ctx.provider_key("step").
    async def save(tx):  # one transaction with the marker: once
        await tx.execute(insert(results).values(key=ctx.key, body=task.model_dump_json()))

    return Done(save=save)


# "0": the clock fills in its own. Raise `version` with every change of the schedule.
told = Task.model_validate({"date": "0", "pages": 1})
nightly = Schedule("nightly", "task", cron=CRON, tz=ZONE, payload=told)
schedules = Schedules(jobs, [nightly], owner=QUEUE, version=1)

"""python worker.py: works until SIGTERM; start as many as you like."""

import asyncio
import os
from zoneinfo import ZoneInfo

from jobs import QUEUE, ZONE, Task, jobs, schedules
from patterns import idempotency
from patterns.bullmq_worker import ReliableWorker
from patterns.core.clock import Periodic
from patterns.core.execution import needs
from patterns.core.job import DAY
from patterns.core.open_store import close, create_all, open_store
from patterns.dead_letter.sweeping import sweeping
from patterns.deadline import within_deadline
from patterns.idempotency.once import inboxes, once
from patterns.observability import configure_logging, logged
from patterns.pipeline import JobContext, Pipeline
from patterns.producer import Producer
from patterns.schedule import ScheduleKeeper, ticking
from patterns.schedule.slots import tick_of
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import typed


@needs("payload")
async def dated(run: JobContext, call_next):
    """The key is the slot's date: the clock's run and one by hand are once together."""
    if tick := tick_of(run.job_id, run.job.data):
        slot = f"{tick.at.astimezone(ZoneInfo(ZONE)):%Y%m%d}"
        run.payload = Task.model_validate({**run.body, "date": slot})
        run.body = run.payload.model_dump(mode="json")
    run.key = str(run.payload.date)
    return await call_next(run)


async def main():
    configure_logging()
    url, store = os.environ["REDIS_URL"], open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    producer = Producer(url)
    pipeline = Pipeline(
        logged(),
        typed(jobs),
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
        Periodic("purge", lambda: idempotency.purge(store, 90 * DAY), every=3600),
    ]
    await run_until_signalled(parts, grace=25)
    await producer.close()
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())

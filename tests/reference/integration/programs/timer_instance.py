"""One instance of an application that reminds people every so often, in one of two ways.

interval: a loop in every instance, as it is usually written
schedule: the schedule lives in Redis; every instance has a worker, one of them gets each tick
"""

import asyncio
import sys
import time

from harness.pipelines import full_pipeline, full_producer
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.schedule import Schedule, Schedules, ticking
from studyhall.patterns.schedule.keeper import tick_of
from studyhall.patterns.timers import every
from studyhall.patterns.typed_jobs import JobTypes, Payload

EVERY = 1.0


class Nothing(Payload):
    pass


async def interval(url):
    redis = producer_client(url)

    async def remind():
        await redis.rpush("reminders", int(time.time() // EVERY))

    print("ready", flush=True)
    await every(EVERY, remind, jitter=0)


async def schedule(url, store_url):
    redis = producer_client(url)

    async def remind(ctx, _):
        tick = tick_of(ctx.job_id, ctx.job.data)
        await redis.rpush("reminders", tick.slot if tick else -1)

    jobs = JobTypes()
    jobs.register(name="remind", payload=Nothing, handler=remind, queue="reminders")
    store = open_store(store_url)
    await create_all(store)
    schedules = Schedules(jobs, [Schedule(id="reminder", job="remind", every=EVERY)])
    await schedules.apply(full_producer(jobs, url, timeout=10), store)
    worker = ReliableWorker("reminders", full_pipeline(jobs, store, ticking(schedules, store)), url=url)
    running = asyncio.create_task(worker.run())
    await worker.ready()
    print("ready", flush=True)
    await running


if __name__ == "__main__":
    kind, *args = sys.argv[1:]
    asyncio.run(interval(*args) if kind == "interval" else schedule(*args))

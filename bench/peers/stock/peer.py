"""BullMQ for Python as it comes: its Worker and its Queue."""

import asyncio
import os

import contest
import uvloop
from bullmq import Job, Queue, Worker

given = contest.options()


async def process(job: Job, token: str) -> None:
    await contest.work_async(job.data)


async def worker() -> None:
    lock = int(contest.takeover(60) * 500)  # lock and check of 30 s each: up to a minute
    Worker(
        given.queue,
        process,
        {
            "connection": given.url,  # as in its documentation, so the client's own time limits apply
            "concurrency": given.concurrency,
            "lockDuration": lock,
            "stalledInterval": lock,
            "maxStalledCount": contest.tries(1),
        },
    )
    await asyncio.Event().wait()


async def enqueue() -> None:
    queue = Queue(given.queue, {"connection": given.url})
    await queue.getJobCounts()
    opts = {"delay": int(given.delay * 1000)} if given.delay else {}
    await contest.fill_async(
        given,
        lambda job: queue.add("job", job, dict(opts)),
        lambda chunk: queue.addBulk([{"name": "job", "data": job, "opts": dict(opts)} for job in chunk]),
    )
    await queue.close()


uvloop.run(worker() if given.verb == "worker" else enqueue())
os._exit(0)  # the library leaves tasks behind that never end

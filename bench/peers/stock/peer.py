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
    # The URL as the documentation shows it: so the client's own time limits hold.
    opts = {"connection": given.url, "concurrency": given.concurrency}
    if given.takeover:
        opts |= {"lockDuration": int(given.takeover * 1000), "stalledInterval": int(given.takeover * 1000)}
    Worker(given.queue, process, opts)
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


if given.verb == "worker":
    contest.prepare_worker(given)
    uvloop.run(worker())
else:
    uvloop.run(enqueue())
os._exit(0)

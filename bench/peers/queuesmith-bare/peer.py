"""Our worker without the pipeline: the bare BullMQ job goes to a function, as with the stock worker."""

import os

import contest
import uvloop
from bullmq import Job, Queue

from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.worker_connections import events_client

given = contest.options()


async def process(job: Job, token: str) -> None:
    await contest.work_async(job.data)


async def worker() -> None:
    seconds = contest.takeover(9)
    reliable = ReliableWorker(
        given.queue,
        process,
        url=given.url,
        concurrency=given.concurrency,
        lock_duration=seconds * 5 / 6,
        stalled_interval=seconds / 6,
    )
    await reliable.run()


async def enqueue() -> None:
    queue = Queue(given.queue, {"connection": events_client(given.url)})
    await queue.getJobCounts()
    opts = {"delay": int(given.delay * 1000)} if given.delay else {}
    await contest.fill_async(
        given,
        lambda job: queue.add("job", job, dict(opts)),
        lambda chunk: queue.addBulk([{"name": "job", "data": job, "opts": dict(opts)} for job in chunk]),
    )
    await queue.close()


uvloop.run(worker() if given.verb == "worker" else enqueue())
os._exit(0)

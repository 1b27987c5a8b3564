"""SAQ on Redis: blocking fetch, a sweep for jobs that got stuck."""

import time

import contest
import uvloop
from saq import Queue, Worker

given = contest.options()
queue = Queue.from_url(given.url, name=given.queue)
limits = {
    "retries": 1 if getattr(given, "kind", "") == "fail" else contest.tries(3),
    "timeout": int(contest.takeover(0 if getattr(given, "kind", "") == "hold" else 10)),
}


async def run(context: dict[str, object], *, job: contest.Job) -> None:
    await contest.work_async(job)


async def worker() -> None:
    sweep = max(1, int(contest.takeover(60)))
    await Worker(queue, [("job", run)], concurrency=given.concurrency, timers={"sweep": sweep}).start()


async def enqueue() -> None:
    await queue.connect()

    async def add(job: contest.Job) -> None:
        due = {"scheduled": int(time.time() + given.delay)} if given.delay else {}
        await queue.enqueue("job", job=job, **limits, **due)

    await contest.fill_async(given, add)


uvloop.run(worker() if given.verb == "worker" else enqueue())

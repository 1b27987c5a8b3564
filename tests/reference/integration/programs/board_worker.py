"""One worker, and jobs that end up in the states that a dashboard shows."""

import asyncio
import sys

from harness.waiting import until
from harness.workers import at_work, counts, queue_at

SHOWN = {"completed": 3, "failed": 1, "active": 1, "delayed": 1}


async def process(job, token):
    if job.name == "fails":
        raise ValueError("no such address")
    if job.name == "lasts":
        await asyncio.Event().wait()


async def main(url, name):
    async with queue_at(url, name) as queue, at_work(name, process, url=url):
        for job in ("sent", "sent", "sent", "fails", "lasts"):
            await queue.add(job, {})
        await queue.add("later", {}, {"delay": 3_600_000})

        async def all_there():
            return await counts(queue) == SHOWN

        await until(all_there, 30, "every state")
        print("ready", flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))

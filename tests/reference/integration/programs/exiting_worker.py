"""A worker whose processor starts a task that calls sys.exit(): asyncio lets that end the loop."""

import asyncio
import sys

from studyhall.patterns.bullmq_worker import ReliableWorker


async def leave():
    await asyncio.sleep(0)
    sys.exit(3)


async def process(job, token):
    if job.name == "group":
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave())
    elif job.name == "gather":
        await asyncio.gather(leave())
    elif job.name == "forgotten":
        job.task = asyncio.create_task(leave())
        await asyncio.sleep(60)


async def main(url):
    await ReliableWorker("q", process, url=url, lock_duration=1, stalled_interval=0.3, max_stalled=2).run()


asyncio.run(main(sys.argv[1]))

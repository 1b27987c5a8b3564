"""A worker run by a bare `asyncio.run()`, whose processor waits or blocks: what a Ctrl-C does to it."""

import asyncio
import sys
import time

from studyhall.patterns.bullmq_worker import ReliableWorker


async def process(job, token):
    print("started", flush=True)
    if job.name == "blocks":
        time.sleep(60)
    await asyncio.sleep(60)


async def main():
    await ReliableWorker("q", process, url=sys.argv[1]).run()


asyncio.run(main())

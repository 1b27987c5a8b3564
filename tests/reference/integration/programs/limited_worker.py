"""One worker process of a rate-limited queue."""

import asyncio
import sys
import time

from bullmq import Worker

from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.rate_limit import queue_limit


async def nothing(_job, _token):
    pass


class OwnCount:
    """The naive limit: each process counts its own starts. With one slot, the next job starts after this one."""

    def __init__(self, most, per):
        self.most, self.per = most, per
        self.opened, self.count = 0.0, 0

    async def __call__(self, _job, _token):
        if self.count == 0:
            self.opened = time.monotonic()
        self.count += 1
        if self.count == self.most:
            await asyncio.sleep(self.opened + self.per - time.monotonic())
            self.count = 0


async def main(url, queue, most, per, kind):
    limiter = queue_limit(most, per=per)
    if kind == "stock":
        options = {"connection": url, "concurrency": 50, "limiter": limiter, "autorun": False}
        working = asyncio.create_task(Worker(queue, nothing, options).run())
    elif kind == "own-count":
        worker = ReliableWorker(queue, OwnCount(most, per), url=url, concurrency=1)
        working = asyncio.create_task(worker.run())
        await worker.ready()
    else:
        worker = ReliableWorker(queue, nothing, url=url, concurrency=50, limiter=limiter)
        working = asyncio.create_task(worker.run())
        await worker.ready()
    print("ready", flush=True)
    await working


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]))

"""One worker process of a rate-limited queue."""

from __future__ import annotations

import asyncio
import sys

from bullmq import Job, Worker

from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.rate_limit import queue_limit


async def nothing(_job: Job, _token: str) -> None:
    pass


async def main(url: str, queue: str, most: int, per: float, kind: str) -> None:
    limiter = queue_limit(most, per=per)
    if kind == "reliable":
        await ReliableWorker(queue, nothing, url=url, concurrency=50, limiter=limiter).run()
    else:
        options = {"connection": url, "concurrency": 50, "limiter": limiter, "autorun": False}
        await Worker(queue, nothing, options).run()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]))

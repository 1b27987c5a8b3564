"""A stock BullMQ worker whose jobs fail in every way. Arguments: Redis URL, queue, lock in ms, [dlq].

Job names: `fails` (an error every time), `refuses` (unrecoverable), `hangs` (never ends: kill the process).
With `dlq` it also has the usual `failed` listener, which copies the job to the list `dlq`; the process is killed while
it copies the job whose data says so.
"""

import asyncio
import os
import signal
import sys

from bullmq import Worker
from bullmq.custom_errors import UnrecoverableError

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.worker_connections import blocking_client


async def process(job, _token):
    print("started", job.name, job.id, flush=True)
    if job.name == "hangs":
        await asyncio.Event().wait()
    if job.name == "refuses":
        raise UnrecoverableError("the card was stolen")
    raise RuntimeError("the provider is down")


async def main(redis_url, queue, lock, listening):
    redis = producer_client(redis_url)
    copies = set()

    async def copy(job):
        if job.data.get("kill") and await redis.set("killed-once", 1, nx=True):
            os.kill(os.getpid(), signal.SIGKILL)
        await redis.rpush("dlq", job.id)

    def on_failed(job, _error):
        copies.add(asyncio.create_task(copy(job)))

    opts = {"connection": blocking_client(redis_url), "autorun": False, "concurrency": 50, "drainDelay": 1}
    opts |= {"lockDuration": lock, "stalledInterval": 300, "maxStalledCount": 0}
    worker = Worker(queue, process, opts)
    if listening:
        worker.on("failed", on_failed)
    await worker.run()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["dlq"]))

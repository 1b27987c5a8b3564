"""Put an unknown job into a queue, past the producer: add_job.py REDIS_URL QUEUE NAME."""

import asyncio
import sys

from bullmq import Queue


async def main(url, queue, name):
    handle = Queue(queue, {"connection": url})
    await handle.add(name, {"note": name, "password": "hunter2-hunter2"}, {})
    await handle.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))

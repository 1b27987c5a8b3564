import asyncio
import os
import sys

from bullmq import Queue


async def main():
    queue = Queue("parcels", {"connection": os.environ["REDIS_URL"]})
    for parcel in sys.argv[1:]:
        await queue.add("label", {"parcel": parcel}, {"attempts": 3, "backoff": 1000})
    await queue.close()


asyncio.run(main())

"""The worker of BullMQ's Python tutorial; its job asks a carrier for a label."""

import asyncio
import json
import os
import signal
import urllib.request

from bullmq import Worker


def buy(parcel):
    data = json.dumps({"parcel": parcel}).encode()
    request = urllib.request.Request(os.environ["CARRIER_URL"] + "/labels", data)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["id"]


async def process(job, job_token):
    return await asyncio.to_thread(buy, job.data["parcel"])


async def main():
    shutdown_event = asyncio.Event()

    def signal_handler(signal, frame):
        shutdown_event.set()

    signal.signal(signal.SIGTERM, signal_handler)
    signal.signal(signal.SIGINT, signal_handler)
    worker = Worker("parcels", process, {"connection": os.environ["REDIS_URL"]})
    await shutdown_event.wait()
    await worker.close()


if __name__ == "__main__":
    asyncio.run(main())

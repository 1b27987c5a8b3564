"""python submit.py PARCEL… --grams 1: a sender as others write it, here in Python."""

import argparse
import asyncio
import os

from bullmq import Queue

from jobs import QUEUE, Task
from patterns.core.connections import producer_client


async def submit(*tasks: Task):
    redis = producer_client(os.environ["REDIS_URL"])  # its errors come within seconds
    queue = Queue(QUEUE, {"connection": redis})
    for task in tasks:
        await queue.add("task", task.model_dump(), {})
    await redis.aclose()


if __name__ == "__main__":
    first, *others = Task.model_fields
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", nargs="+", metavar=first)
    for name in others:
        parser.add_argument(f"--{name}", required=Task.model_fields[name].is_required())
    given = vars(parser.parse_args())
    keys = given.pop("keys")
    asyncio.run(submit(*(Task.model_validate({first: key, **given}) for key in keys)))

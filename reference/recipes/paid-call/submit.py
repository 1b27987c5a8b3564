"""python submit.py PARCEL… --grams 1: exit code 0 means taken, once per key."""

import argparse
import asyncio
import os

from jobs import QUEUE, Task, key_of
from patterns.producer import JobRequest, Producer


async def submit(*tasks: Task):
    producer = Producer(os.environ["REDIS_URL"])
    for task in tasks:
        request = JobRequest("task", task.model_dump(), key=key_of(task), queue=QUEUE)
        await producer.enqueue(request)
    await producer.close()


if __name__ == "__main__":
    first, *others = Task.model_fields
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", nargs="+", metavar=first)
    for name in others:
        parser.add_argument(f"--{name}", required=Task.model_fields[name].is_required())
    given = vars(parser.parse_args())
    keys = given.pop("keys")
    asyncio.run(submit(*(Task.model_validate({first: key, **given}) for key in keys)))

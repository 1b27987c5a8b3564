"""python run_now.py 20261117… --pages 1: run these now, unless the clock did."""

import argparse
import asyncio
import os

from jobs import QUEUE, Task
from patterns.producer import JobRequest, Producer


async def submit(*tasks: Task):
    producer = Producer(os.environ["REDIS_URL"])
    for task in tasks:
        data, key = task.model_dump(mode="json"), str(task.date)
        await producer.enqueue(JobRequest(QUEUE, data, key=key, queue=QUEUE))
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

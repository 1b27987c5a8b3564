"""python submit.py INVOICE… --amount 1: exit code 0 means stored, once per key."""

import argparse
import asyncio
import os

from jobs import Task, record
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import begin


async def submit(*tasks: Task):
    store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    for task in tasks:
        async with begin(store, durable=True) as tx:  # both rows or neither
            await record(tx, task)
    await close(store)


if __name__ == "__main__":
    first, *others = Task.model_fields
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", nargs="+", metavar=first)
    for name in others:
        parser.add_argument(f"--{name}", required=Task.model_fields[name].is_required())
    given = vars(parser.parse_args())
    keys = given.pop("keys")
    asyncio.run(submit(*(Task.model_validate({first: key, **given}) for key in keys)))

"""python submit.py FILE.csv UPLOAD… --note text: exit code 0: taken, once per key."""

import argparse
import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

from jobs import QUEUE, Task, key_of, path_of
from patterns.producer import JobRequest, Producer


def keep(file: Path, task: Task):
    """A copy that nobody changes: the first under a key stays."""
    target = path_of(task)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(f"{target}.{os.getpid()}")
    shutil.copyfile(file, scratch)
    with suppress(FileExistsError):
        os.link(scratch, target)  # whole at once, never over another
    scratch.unlink()


async def submit(file: Path, *tasks: Task):
    producer = Producer(os.environ["REDIS_URL"])
    for task in tasks:
        keep(file, task)
        request = JobRequest("task", task.model_dump(), key=key_of(task), queue=QUEUE)
        await producer.enqueue(request)
    await producer.close()


if __name__ == "__main__":
    first, *others = Task.model_fields
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("keys", nargs="+", metavar=first)
    for name in others:
        parser.add_argument(f"--{name}", required=Task.model_fields[name].is_required())
    given = vars(parser.parse_args())
    file, keys = given.pop("file"), given.pop("keys")
    tasks = [Task.model_validate({first: key, **given}) for key in keys]
    asyncio.run(submit(file, *tasks))

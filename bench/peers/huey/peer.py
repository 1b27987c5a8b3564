"""Huey on Redis. It has no acknowledgement: only the worker has what it took."""

import logging

import contest
from huey import RedisHuey

given = contest.options()
huey = RedisHuey(given.queue, url=given.url, results=False)


@huey.task(name="job", retries=3)
def run(job: contest.Job) -> None:
    contest.work(job)


def add(job: contest.Job) -> None:
    if given.delay:
        run.schedule((job,), delay=given.delay)
    else:
        huey.enqueue(run.s(job))


if given.verb == "worker":
    logging.getLogger("huey").setLevel("ERROR")
    huey.create_consumer(workers=given.concurrency, worker_type="thread", periodic=False).run()
else:
    huey.storage.conn.ping()
    contest.fill(given, add)

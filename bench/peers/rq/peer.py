"""RQ with the forking worker that it recommends: a child process per job."""

from datetime import timedelta

import contest
from redis import Redis
from rq import Queue, Retry, Worker

given = contest.options()
connection = Redis.from_url(given.url)
queue = Queue(given.queue, connection=connection)
retry = None if getattr(given, "kind", "") == "fail" else Retry(max=contest.tries(3))


def add(job: contest.Job) -> None:
    if given.delay:
        queue.enqueue_in(timedelta(seconds=given.delay), contest.work, job, retry=retry)
    else:
        queue.enqueue(contest.work, job, retry=retry)


def add_many(chunk: list[contest.Job]) -> None:
    queue.enqueue_many([Queue.prepare_data(contest.work, (job,), retry=retry) for job in chunk])


if given.verb == "worker":
    ours = {}
    if given.takeover:
        ours = {
            "job_monitoring_interval": max(1, int(given.takeover)),
            "maintenance_interval": int(given.takeover),
            "worker_ttl": 15 + int(given.takeover),  # an idle worker does its maintenance 15 s earlier than that
        }
    Worker([queue], connection=connection, **ours).work(logging_level="ERROR")
else:
    connection.ping()
    contest.fill(given, add, add_many)

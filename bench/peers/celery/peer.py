"""Celery with prefork and Redis, late acknowledgement as its documentation advises for jobs that must not be lost."""

import contest
from celery import Celery

given = contest.options()
# by default it looks for abandoned messages every 100 s
often = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1} if given.takeover else {}
app = Celery("bench", broker=given.url)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    task_default_queue=given.queue,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": contest.takeover(3600), **often},
    worker_prefetch_multiplier=1 if given.takeover else 4,
    worker_hijack_root_logger=False,
)


@app.task(name="job")
def run(job: contest.Job) -> None:
    contest.work(job)


if given.verb == "worker":
    quiet = ["--without-gossip", "--without-mingle", "--loglevel", "ERROR"]
    app.worker_main(["worker", "--pool", "prefork", "--concurrency", str(given.processes), *quiet])
else:
    app.connection_for_write().ensure_connection()
    contest.fill(given, lambda job: run.apply_async((job,), countdown=given.delay))

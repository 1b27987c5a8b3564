"""dramatiq on Redis: threads, acknowledgement after the run, heartbeats per worker process."""

import os
import sys
from pathlib import Path

import contest
import dramatiq
from dramatiq.brokers.redis import RedisBroker

given = contest.options() if __name__ == "__main__" else None
broker = RedisBroker(
    url=contest.setting("url"),
    heartbeat_timeout=int(contest.takeover(60) * 1000),
    # this many commands in a million look for dead workers; its default is 1,000
    maintenance_chance=1_000_000 if contest.setting("takeover") else 1_000,
)
dramatiq.set_broker(broker)


@dramatiq.actor(actor_name="job", queue_name=contest.setting("queue"), time_limit=2 * contest.HOLD_SECONDS * 1000)
def run(job: contest.Job) -> None:
    contest.work(job)


def add(job: contest.Job) -> None:
    assert given is not None  # called only by `fill`
    options = {"max_retries": 0} if given.kind == "fail" else {}
    delay = int(given.delay * 1000) if given.delay else None
    run.send_with_options(args=(job,), delay=delay, **options)


if given and given.verb == "worker":
    tool = str(Path(sys.executable).with_name("dramatiq"))
    flags = ["--processes", str(given.processes), "--threads", str(given.concurrency)]
    os.execv(tool, [tool, "peer", "--path", str(Path(__file__).parent), *flags])
elif given:
    broker.client.ping()
    contest.fill(given, add)

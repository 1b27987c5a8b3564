"""taskiq with the Redis stream broker, its only Redis broker that acknowledges."""

import asyncio
import os
import sys
from pathlib import Path

import contest
from taskiq_redis import RedisStreamBroker

given = contest.options() if __name__ == "__main__" else None
broker = RedisStreamBroker(
    contest.setting("url"),
    queue_name=contest.setting("queue"),
    idle_timeout=int(contest.takeover(600) * 1000),
    # by default a lock that a killed worker held is never released
    unacknowledged_lock_timeout=float(contest.setting("takeover")) if contest.setting("takeover") else None,
)


@broker.task(task_name="job")
async def run(job: contest.Job) -> None:
    await contest.work_async(job)


async def enqueue() -> None:
    assert given is not None  # only called below
    await broker.startup()
    await contest.fill_async(given, run.kiq)
    await broker.shutdown()


if given and given.verb == "worker":
    tool = str(Path(sys.executable).with_name("taskiq"))
    flags = ["--workers", str(given.processes), "--max-async-tasks", str(given.concurrency)]
    here = str(Path(__file__).parent)
    os.execv(tool, [tool, "worker", "peer:broker", "--app-dir", here, *flags, "--log-level", "ERROR"])
elif given:
    asyncio.run(enqueue())

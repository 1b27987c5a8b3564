"""arq: a job stays in its sorted set until it ends, with an in-progress key beside it."""

import asyncio

import contest
import uvloop
from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

given = contest.options()
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
settings = RedisSettings.from_dsn(given.url)


async def run(context: dict[str, object], job: contest.Job) -> None:
    await contest.work_async(job)


async def enqueue() -> None:
    redis = await create_pool(settings, default_queue_name=given.queue)
    await contest.fill_async(given, lambda job: redis.enqueue_job("job", job, _defer_by=given.delay))


if given.verb == "worker":
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    Worker(
        [func(run, name="job")],
        queue_name=given.queue,
        redis_settings=settings,
        max_jobs=given.concurrency,
        # its in-progress key lives ten seconds longer than a job may run
        job_timeout=max(1.0, contest.takeover(310) - 10),
        max_tries=contest.tries(5),
        poll_delay=0.01,
        log_results=False,
    ).run()
else:
    asyncio.run(enqueue())

# [bare]
# A queue that others write to
import time

from labels import print_label
from patterns.bullmq_worker import FailPermanently, ReliableWorker, RetryLater
from patterns.retry import decide, surviving

POLICY = surviving(600)  # the printer may be away for ten minutes


async def process(job, token):
    try:
        return await print_label(job.data["parcel"])  # your work; any JSON value
    except Exception as error:  # not CancelledError: the worker drains or lost the lock
        due = (job.timestamp + (job.opts.get("delay") or 0)) / 1000
        waits = max(0, job.attemptsStarted - 1 - job.attemptsMade)
        then = decide(error, POLICY, job.attemptsMade, age=time.time() - due, waits=waits)
        if then.delay is None:
            raise FailPermanently(then.reason) from error
        raise RetryLater(then.delay, consume_attempt=then.consume_attempt, reason=then.reason) from error


# await ReliableWorker("labels", process, url=url).run()
# [/bare]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio
    import json
    from dataclasses import replace

    import redis.asyncio as redis
    from bullmq import Queue

    from labels import failures, printed
    from patterns.core.connections import producer_client
    from patterns.core.errors import Permanent, Snooze, Transient

    globals()["POLICY"] = replace(POLICY, scale=0)  # no pauses in a test
    queue = Queue("labels", {"connection": producer_client(redis_url)})
    failures.update(
        flaky=[Transient("busy")] * 3 + [Snooze(60)], gone=[Permanent("no such street")], odd=[ValueError()]
    )
    for parcel in ("good", *failures):
        await queue.add("print", {"parcel": parcel}, {"jobId": parcel})  # no attempts: one, by BullMQ's rule
    await queue.add("print", {"no": "parcel"}, {"jobId": "malformed"})
    running = ReliableWorker("labels", process, url=redis_url)
    task = asyncio.create_task(running.run())
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    async with asyncio.timeout(30):
        while await client.zcard("bull:labels:completed") < 3 or not await client.hget(
            "bull:labels:gone", "finishedOn"
        ):
            await asyncio.sleep(0.02)
    await running.drain(5)
    await task
    assert sorted(printed) == ["flaky", "good", "odd"]
    assert json.loads(await client.hget("bull:labels:flaky", "returnvalue")) == "flaky"
    assert "no such street" in await client.hget("bull:labels:gone", "failedReason")
    assert await client.hget("bull:labels:flaky", "atm") == "4", "three failures and the run that worked"
    await client.aclose()
    await queue.close()

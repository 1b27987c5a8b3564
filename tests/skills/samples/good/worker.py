# Code that is right, or that only looks like a finding. Nothing may be reported here.
import asyncio
import logging
import signal

from bullmq import Queue, Worker

logger = logging.getLogger(__name__)
OPTIONS = {"attempts": 5, "backoff": {"type": "exponential", "delay": 1000}, "removeOnFail": {"age": 1209600}}
tasks: set[asyncio.Task] = set()


async def process(job, token):
    logger.info("processing", extra={"job": job.id, "name": job.name})
    async with asyncio.timeout(30):
        return await work(job.data)


async def enqueue(queue: Queue, order_id: str):
    await queue.add("receipt", {"order": order_id}, {**OPTIONS, "jobId": f"receipt.{order_id}"})
    await queue.add("receipt", {"order": order_id}, OPTIONS)
    seen = set()
    seen.add(order_id)  # a set, not a queue


async def place(session, outbox, order):
    async with session.begin():
        session.add(order)
        await outbox.publish(order)  # a row, in spite of its name
    await bus.publish(order)


async def renew(redis, key, token, ttl):
    if await redis.set(key, token, nx=True, ex=ttl):
        await redis.eval(COMPARE_AND_DELETE, 1, key, token)


async def heartbeat(ttl):
    while True:
        await beat()
        await asyncio.sleep(ttl / 3)


async def wait_until_ready(check):
    while True:
        if await check():
            return
        await asyncio.sleep(5)


async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = {"connection": client, "maxStalledCount": 1000}
    worker = Worker("mail", process, options)  # queuesmith: ignore[stock-worker] drained by hand
    worker.on("failed", lambda job, error: logger.warning("failed %s", job.id))
    task = asyncio.create_task(heartbeat(9))
    tasks.add(task)
    await stop.wait()
    last = worker.opts.get("attempts") if worker.attemptsMade + 1 >= 3 else None
    return last


async def suppressed(redis):
    # queuesmith: ignore[set-nx-idempotency] a cache fill: losing it costs a second look-up
    fresh = await redis.set("warm", "1", nx=True, ex=5)
    return await work(fresh)

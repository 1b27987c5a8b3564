# A worker as it is often published. Each marked line must be found: `# finds: rule[, rule]`.
import asyncio
import logging
import time

import requests
from bullmq import Queue, Worker

logger = logging.getLogger(__name__)
queue = Queue("mail", {"connection": "redis://localhost"})  # finds: redis-default-timeout
dead_queue = Queue("dead", {"connection": "redis://localhost"})  # finds: redis-default-timeout


async def process(job, token):  # finds: no-deadline
    logger.info("processing %s", job.data)  # finds: payload-logged
    key = f"processed:{job.id}"  # finds: job-id-as-key
    if not await redis.set(key, "1", nx=True, ex=86400):  # finds: set-nx-idempotency
        return None
    for attempt in range(3):  # finds: inner-retry
        try:
            return requests.post("https://mail.example/send", json=job.data)  # finds: blocking-in-async, http-no-timeout
        except OSError:
            await asyncio.sleep(2**attempt)


async def on_failed(job, error):
    if job.attemptsMade >= job.opts["attempts"]:  # finds: attempts-made-filter
        await dead_queue.add("dead", job.data, {"attempts": 1, "removeOnFail": 50})  # finds: remove-on-fail-count


async def nightly():
    if not await redis.set("cron-lock:nightly", "1", nx=True, ex=60):  # finds: lock-without-token
        return
    try:
        await clean()
    finally:
        await redis.delete("cron-lock:nightly")


async def place(session, order):
    async with session.begin():
        session.add(order)
        await queue.add("receipt", {"id": order.id}, {"attempts": 3, "removeOnFail": {"age": 60}})  # finds: publish-in-transaction, add-without-id
    await queue.add("ping", {})  # finds: missing-attempts, missing-retention
    opts = {"attempts": 3, "removeOnComplete": True, "jobId": f"order:{order.id}"}
    await queue.add("a", {}, {"attempts": 3, "removeOnComplete": True, "jobId": f"order:{order.id}"})  # finds: colon-job-id
    await queue.add("b", {}, {"attempts": 3, "removeOnComplete": True, "repeat": {"every": 1000}})  # finds: repeat-option
    await asyncio.gather(queue.add("c", {}, opts), dead_queue.add("c", {}, opts))  # finds: gather-fan-out


async def metrics_loop():
    while True:  # finds: interval-loop
        await report()
        await asyncio.sleep(60)


async def main():
    worker = Worker("mail", process, {"connection": "redis://localhost", "limiter": {"max": 1, "duration": 1, "groupKey": "user"}})  # finds: no-shutdown, stall-default, redis-default-timeout, group-key, stock-worker
    worker.on("failed", on_failed)  # finds: listener-dead-letter
    asyncio.create_task(metrics_loop())  # finds: task-not-held
    await asyncio.sleep(1e9)


async def slow():
    time.sleep(3)  # finds: blocking-in-async

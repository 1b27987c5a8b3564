import asyncio
import logging
import os
import signal
import subprocess
import urllib.request
import uuid
from dataclasses import dataclass

import httpx
import requests
from bullmq import Queue, Worker

log = logging.getLogger(__name__)
OPTIONS = {"attempts": 5, "removeOnFail": {"age": 1209600}, "removeOnComplete": {"age": 3600}}
PRIORITY = {"urgent": 100, "normal": 10, "bulk": 1}  # fault: inverted-priority
RIGHT_PRIORITY = {"urgent": 1, "normal": 10, "bulk": 100}
queue = Queue("images", {"connection": client})
plain = Queue("images", {"connection": os.environ["REDIS_URL"]})
loose = Queue("images", {"connection": "redis://redis:6379"})  # fault: redis-default-timeout


async def process(job, token):
    async with asyncio.timeout(60):
        try:
            return await resize(job.data["image"])
        except Exception as error:  # fault: swallowed-error
            log.error("resize failed: %s", error)
            return {"ok": False}


async def process_right(job, token):
    async with asyncio.timeout(60):
        try:
            return await resize(job.data["image"])
        except FileNotFoundError:
            return {"ok": False, "gone": True}


async def resize(path):
    subprocess.run(["convert", path], check=True)  # fault: blocking-in-async
    process = await asyncio.create_subprocess_exec("convert", path)
    return await process.wait()


async def download(job):
    with urllib.request.urlopen(job.data["url"]) as answer:  # fault: blocking-in-async, http-no-timeout
        return answer.read()


async def download_right(job):
    async with httpx.AsyncClient(timeout=10) as http:
        return await http.get(job.data["url"])


async def endless(job):
    async with httpx.AsyncClient(timeout=None) as http:  # fault: http-no-timeout
        return await http.get(job.data["url"])


async def charge(job):
    key = str(uuid.uuid4())
    await stripe.charge(job.data["amount"], idempotency_key=key)  # fault: key-per-try


async def charge_right(job):
    await stripe.charge(job.data["amount"], idempotency_key=job.data["request_key"])


async def request_charge(amount):
    # Made once, with the job: equal in every try.
    await queue.add("charge", {"amount": amount, "idempotency_key": str(uuid.uuid4())}, OPTIONS)


async def enqueue(session, image, user):
    await queue.add("resize", image.__dict__, OPTIONS)  # fault: row-in-payload
    await queue.add("resize", {"user": user.to_dict()}, OPTIONS)  # fault: row-in-payload
    await queue.add("resize", {"image": image.id}, OPTIONS)
    await queue.add("mail", {"image": image.id}, {**OPTIONS, "priority": PRIORITY["urgent"]})
    await queue.add("mail", {"image": 1}, {"attempts": 3, "removeOnFail": True})  # fault: remove-on-fail-count, add-without-id
    log.info("mailing %s", user.email)  # fault: secret-logged
    log.info(f"login with {user.password}")  # fault: secret-logged
    log.info("mailing user %s", user.id)
    log.info("password set: %s", bool(user.password))
    log.debug("mail to %s", redact(user.email))


async def health():
    waiting = await queue.getWaitingCount()  # fault: partial-health
    return {"ok": waiting < 1000}


async def health_right():
    counts = await queue.getJobCounts("waiting", "prioritized", "delayed", "active")
    return {"ok": sum(counts.values()) < 1000}


async def on_sigterm():
    for job in running:
        await queue.add(job.name, job.data, OPTIONS)  # fault: readd-on-stop


async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    options = {"connection": client, "maxStalledCount": 1000}
    worker = Worker("images", process, options)  # fault: stock-worker
    await stopped.wait()
    await worker.close()


@dataclass
class Plain:
    email: str


async def report(job):
    response = requests.get("https://api.example/report", timeout=5)  # fault: blocking-in-async
    response.raise_for_status()  # fault: retried-4xx
    return response.json()

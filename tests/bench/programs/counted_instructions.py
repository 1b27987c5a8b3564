"""Prints how many instructions one job costs, ours with every step on and with the stock worker: added alone, added in
bulk, executed, and executed with 100 KB. Runs under callgrind, which counts when it is told to. The server runs outside.

Usage: valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file=FILE python counted_instructions.py REDIS_URL
STORE_URL FILE"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop
from bullmq import Job, Queue, Worker

from harness.pipelines import KEYS, full_pipeline, full_producer
from harness.workers import at_work
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.observability import configure_logging
from studyhall.patterns.pipeline import JobContext
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload

WARM, COUNTED = 50, 100
BIG = 100_000
MOST = 256 * 1024


class Number(Payload):
    n: int
    text: str = ""


class Callgrind:
    """Tells callgrind to count, from inside the process that it watches."""

    def __init__(self, out: str) -> None:
        self.out, self.dumps = out, 0

    def tell(self, command: str) -> None:
        with subprocess.Popen(["vgdb", f"--pid={os.getpid()}", *command.split()], stdout=-3, stderr=-3) as told:
            while told.poll() is None:  # callgrind listens while instructions pass, few of them
                time.sleep(0.002)
            assert told.returncode == 0, command

    def start(self) -> None:
        self.tell("zero")
        self.tell("instrumentation on")

    def stop(self) -> int:
        self.tell("instrumentation off")
        self.tell("dump")
        self.dumps += 1
        text = Path(f"{self.out}.{self.dumps}").read_text()
        return int(text.rpartition("totals:")[2].split()[0])

    @contextlib.contextmanager
    def counting(self, found: dict[str, float], name: str) -> Iterator[None]:
        self.start()
        yield
        found[name] = round(self.stop() / COUNTED)


class Counter:
    """Starts counting at job WARM, and is done with job WARM + COUNTED."""

    def __init__(self, callgrind: Callgrind) -> None:
        self.callgrind, self.found = callgrind, 0
        self.jobs, self.done = 0, asyncio.Event()

    def count(self) -> None:
        self.jobs += 1
        if self.jobs == WARM:
            self.callgrind.start()
        elif self.jobs == WARM + COUNTED:
            self.found = round(self.callgrind.stop() / COUNTED)
            self.done.set()

    async def handle(self, ctx: JobContext, payload: Number) -> dict[str, int]:
        self.count()
        return {"n": payload.n}

    async def process(self, job: Job, token: str) -> None:
        self.count()


def data(first: int, count: int, size: int = 0) -> list[dict[str, object]]:
    return [{"n": n, "text": "x" * size} for n in range(first, first + count)]


async def ours(callgrind: Callgrind, redis: str, url: str) -> dict[str, float]:
    configure_logging("INFO", open(os.devnull, "w"))  # noqa: SIM115
    found: dict[str, float] = {}
    store = open_store(url)
    await create_all(store)

    def requests(*args: int) -> list[JobRequest]:
        return [JobRequest("number", one, key=f"n-{size}-{one['n']}") for one in data(*args)]

    for name, size in (("execute", 0), ("execute 100 KB", BIG)):
        counter, jobs = Counter(callgrind), JobTypes()
        jobs.register(name="number", payload=Number, handler=counter.handle, queue=f"numbers{size}")
        producer = full_producer(jobs, redis, signer=Signer(KEYS), most_bytes=MOST, timeout=60)
        await producer.enqueue_many(requests(0, WARM, size))
        if not size:
            for request in requests(10_000, WARM):
                await producer.enqueue(request)
            await producer.redis.flushall()
            with callgrind.counting(found, "enqueue"):
                for request in requests(20_000, COUNTED):
                    await producer.enqueue(request)
            await producer.redis.flushall()
            with callgrind.counting(found, "enqueue_many"):
                await producer.enqueue_many(requests(0, COUNTED))
            await producer.enqueue_many(requests(COUNTED, 2 * WARM))
        else:
            await producer.enqueue_many(requests(WARM, COUNTED + WARM, size))
        pipeline = full_pipeline(jobs, store, signer=Signer(KEYS), most_bytes=MOST)
        async with at_work(f"numbers{size}", pipeline, url=redis, concurrency=50), asyncio.timeout(200):
            await counter.done.wait()
        found[name] = counter.found
        await producer.close()
    return found


async def stock(callgrind: Callgrind, redis: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, size in (("execute", 0), ("execute 100 KB", BIG)):
        queue, counter = Queue(f"stock{size}", {"connection": redis}), Counter(callgrind)

        async def bulk(*args: int, queue: Queue = queue) -> None:
            await queue.addBulk([{"name": "number", "data": one, "opts": {}} for one in data(*args)])

        await bulk(0, WARM, size)
        if not size:
            with callgrind.counting(found, "enqueue"):
                for one in data(WARM, COUNTED):
                    await queue.add("number", one, {})
            with callgrind.counting(found, "enqueue_many"):
                await bulk(0, COUNTED)
        else:
            await bulk(0, COUNTED + WARM, size)
        worker = Worker(f"stock{size}", counter.process, {"connection": redis, "concurrency": 50})
        async with asyncio.timeout(200):
            await counter.done.wait()
        found[name] = counter.found
        await worker.close(force=True)
        await queue.close()
    return found


async def main(redis: str, url: str, out: str) -> None:
    callgrind = Callgrind(out)
    print(json.dumps({"ours": await ours(callgrind, redis, url), "stock": await stock(callgrind, redis)}), flush=True)


uvloop.run(main(*sys.argv[1:]))
os._exit(0)  # the threads of the store

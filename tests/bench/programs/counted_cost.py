"""Print what one job costs, with every step of ours on and with the stock worker: added alone, added in bulk, executed,
executed with 100 KB. Counted in calls of Python and C functions (in the event loop's thread), or under callgrind in
instructions, with its output file as the third argument. The server is not counted.

Usage: counted_cost.py REDIS_URL STORE_URL [CALLGRIND_OUT]"""

import asyncio
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from pathlib import Path

import uvloop
from bullmq import Queue, Worker

from harness.pipelines import KEYS, full_pipeline, full_producer
from harness.workers import at_work
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.observability import configure_logging
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload

WARM, COUNTED = 50, 250
SIZES = {"execute": 0, "execute 100 KB": 100_000}
MOST = 256 * 1024
LIMIT = 600.0  # seconds; callgrind is slow, more so on a busy machine


class Number(Payload):
    n: int
    text: str = ""


class Calls:
    def start(self):
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self):
        self._profile.disable()
        return float(pstats.Stats(self._profile).total_calls)  # type: ignore[attr-defined]


class Instructions:
    """Tells callgrind what to do, from inside the process that it watches."""

    def __init__(self, out):
        self._out, self._dumps = out, 0

    def start(self):
        self._tell("zero")
        self._tell("instrumentation", "on")

    def stop(self):
        self._tell("instrumentation", "off")
        self._tell("dump")
        self._dumps += 1
        return float(Path(f"{self._out}.{self._dumps}").read_text().rpartition("totals:")[2].split()[0])

    def _tell(self, *command):
        vgdb = ["vgdb", f"--pid={os.getpid()}", *command]
        with subprocess.Popen(vgdb, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:  # it listens while instructions pass, if only a few
                time.sleep(0.002)
            assert process.returncode == 0, command


class Cost:
    """By `counter`, per job."""

    def __init__(self, counter):
        self._counter, self.costs = counter, {}  # type: ignore[var-annotated]

    async def of(self, name, work):
        self._counter.start()
        await work
        self.costs[name] = round(self._counter.stop() / COUNTED, 1)

    def executions(self, name):
        """A function to call in every job, and an event for when jobs WARM to WARM + COUNTED are counted."""
        jobs, done = 0, asyncio.Event()

        def ran():
            nonlocal jobs
            jobs += 1
            if jobs == WARM:
                self._counter.start()
            elif jobs == WARM + COUNTED:
                self.costs[name] = round(self._counter.stop() / COUNTED, 1)
                done.set()

        return ran, done


def data(first, count, size=0):
    return [{"n": n, "text": "x" * size} for n in range(first, first + count)]


async def ours(cost, redis, url):
    configure_logging("INFO", open(os.devnull, "w"))  # noqa: SIM115
    store = open_store(url)
    await create_all(store)
    for name, size in SIZES.items():
        (ran, done), jobs, queue = cost.executions(name), JobTypes(), f"numbers{size}"

        async def handle(ctx, payload: Number, ran=ran):
            ran()
            return {"n": payload.n}

        def requests(first, count, size=size):
            return [JobRequest("number", each, key=f"{size}-{each['n']}") for each in data(first, count, size)]

        jobs.register(name="number", payload=Number, handler=handle, queue=queue)
        producer = full_producer(jobs, redis, signer=Signer(KEYS), most_bytes=MOST, timeout=LIMIT)

        async def one_by_one(producer, some):
            for request in some:
                await producer.enqueue(request)

        await producer.enqueue_many(requests(0, WARM))
        if not size:
            await cost.of("enqueue", one_by_one(producer, requests(WARM, COUNTED)))
            await producer.redis.flushall()
            await producer.enqueue_many(requests(0, WARM))
            await cost.of("enqueue_many", producer.enqueue_many(requests(WARM, COUNTED)))
        else:
            await producer.enqueue_many(requests(WARM, COUNTED))
        await producer.enqueue_many(requests(WARM + COUNTED, WARM))
        pipeline = full_pipeline(jobs, store, signer=Signer(KEYS), most_bytes=MOST)
        async with (
            # No lock may expire, however slow callgrind is: a second execution would be counted too.
            at_work(queue, pipeline, url=redis, concurrency=50, lock_duration=LIMIT),
            asyncio.timeout(LIMIT),
        ):
            await done.wait()
        await producer.close()


async def stock(cost, redis):
    async def one_by_one(queue):
        for each in data(WARM, COUNTED):
            await queue.add("number", each, {})

    async def bulk(queue, count, size=0):
        await queue.addBulk([{"name": "number", "data": each, "opts": {}} for each in data(0, count, size)])

    def counting(ran):
        async def process(job, token):  # a third parameter would be an AbortSignal
            ran()

        return process

    added = Queue("stock", {"connection": redis})
    await bulk(added, WARM)
    await cost.of("enqueue", one_by_one(added))
    await cost.of("enqueue_many", bulk(added, COUNTED))
    for name, size in SIZES.items():
        (ran, done), queue = cost.executions(name), Queue(f"stock{size}", {"connection": redis})

        await bulk(queue, WARM + COUNTED + WARM, size)
        # Never closed: that can take forever.
        Worker(queue.name, counting(ran), {"connection": redis, "concurrency": 50})
        async with asyncio.timeout(LIMIT):
            await done.wait()
            while sum((await queue.getJobCounts("wait", "active")).values()):
                await asyncio.sleep(0.05)


async def main(redis, url, out=""):
    counter = Instructions(out) if out else Calls()
    our_cost, stock_cost = Cost(counter), Cost(counter)
    await ours(our_cost, redis, url)
    await stock(stock_cost, redis)
    print(json.dumps({"ours": our_cost.costs, "stock": stock_cost.costs}), flush=True)


uvloop.run(main(*sys.argv[1:]))
os._exit(0)  # the threads of the store

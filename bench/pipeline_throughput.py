"""No-op jobs per second of one process at concurrency 50: the stock worker, ours bare, ours with the full pipeline.

Same Redis, same run, alternating rounds; medians and spread. The pipeline is the one the app runs: signature,
validation, crash budget, deadline, idempotency marker and result in SQLite (group commit), one log line, metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from bullmq import Job, Queue, Worker

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "reference")]

from harness.redis import RedisServer  # noqa: E402
from studyhall.patterns.bullmq_worker import ReliableWorker  # noqa: E402
from studyhall.patterns.observability import configure_logging  # noqa: E402
from studyhall.patterns.pipeline import JobContext, Pipeline  # noqa: E402
from studyhall.patterns.producer import JobRequest, Producer  # noqa: E402
from studyhall.patterns.signed_payload import Signer  # noqa: E402
from studyhall.patterns.store import close, create_all, open_store  # noqa: E402
from studyhall.patterns.typed_jobs import JobTypes, Payload  # noqa: E402

CONCURRENCY = 50
KEYS = ["a-signing-key-for-the-benchmark"]
Processor = Callable[[Job, str], Awaitable[Any]]


class Nothing(Payload):
    number: int


async def nothing(ctx: JobContext, payload: Nothing) -> dict[str, int]:
    return {"number": payload.number}


def job_types() -> JobTypes:
    jobs = JobTypes()
    jobs.register(name="nothing", payload=Nothing, handler=nothing, queue="bench")
    return jobs


async def noop(job: Job, token: str) -> None:
    return None


async def fill(producer: Producer, jobs: int) -> None:
    await producer.redis.flushall()
    for start in range(0, jobs, 500):
        await producer.enqueue_many(
            [JobRequest("nothing", {"number": n}, key=f"n-{n}") for n in range(start, min(start + 500, jobs))]
        )


async def drained(queue: Queue) -> None:
    while True:
        counts = await queue.getJobCounts("waiting", "prioritized", "active")
        if not any(counts.values()):
            return
        await asyncio.sleep(0.01)


async def stock(url: str, jobs: int, queue: Queue) -> float:
    began = time.perf_counter()
    worker = Worker("bench", noop, {"connection": url, "concurrency": CONCURRENCY})
    await drained(queue)
    spent = time.perf_counter() - began
    await worker.close(force=True)
    return jobs / spent


async def ours(url: str, jobs: int, queue: Queue, processor: Processor) -> float:
    began = time.perf_counter()
    worker = ReliableWorker("bench", processor, url=url, concurrency=CONCURRENCY)
    running = asyncio.create_task(worker.run())
    await drained(queue)
    spent = time.perf_counter() - began
    await worker.drain(5)
    await running
    return jobs / spent


async def main(jobs: int, rounds: int) -> dict[str, Any]:
    server = RedisServer.start()
    rates: dict[str, list[float]] = {"stock": [], "bare": [], "pipeline": []}
    with tempfile.TemporaryDirectory() as folder:
        configure_logging("INFO", stream=open(Path(folder) / "jobs.log", "w"))  # noqa: SIM115
        logging.getLogger("redis").setLevel("ERROR")
        producer = Producer(job_types(), server.url, signer=Signer(KEYS), timeout=30)
        queue = producer.queue("bench")
        try:
            for number in range(rounds):
                store = open_store(f"sqlite:///{folder}/{number}.db")
                await create_all(store)
                pipeline = Pipeline(job_types(), store, signer=Signer(KEYS))
                for name, measured in rates.items():
                    await fill(producer, jobs)
                    if name == "stock":
                        measured.append(await stock(server.url, jobs, queue))
                    else:
                        measured.append(
                            await ours(server.url, jobs, queue, noop if name == "bare" else pipeline)
                        )
                await close(store)
        finally:
            await producer.close()
            server.stop()
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    return {
        "jobs": jobs,
        "concurrency": CONCURRENCY,
        "rounds": {name: [round(value) for value in values] for name, values in rates.items()},
        "jobs_per_second": medians,
        "times_stock": {name: round(medians[name] / medians["stock"], 2) for name in ("bare", "pipeline")},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    result = uvloop.run(main(options.jobs, options.rounds))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        base = result["jobs_per_second"]["stock"]
        for name, rate in result["jobs_per_second"].items():
            print(
                f"{name:10} {rate:>8,} jobs/s   {rate / base:.2f} × stock   rounds {result['rounds'][name]}"
            )

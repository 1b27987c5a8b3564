"""What a backlog costs: adding and fetching one job while 1,000 to 1,000,000 others wait."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
from bullmq.backends.redis_backend import RedisBackend
from bullmq.redis_connection import RedisConnection

from bench.figures import Value, less
from bench.lab import Lab
from harness.pipelines import KEYS
from studyhall.patterns.bullmq_worker.autopipeline import AutoPipeline
from studyhall.patterns.bullmq_worker.ledger import JobLedger
from studyhall.patterns.core.worker_connections import worker_client
from studyhall.patterns.pipeline import JobContext
from studyhall.patterns.producer import JobRequest, Producer
from studyhall.patterns.signed_payload import Signer, signing
from studyhall.patterns.typed_jobs import JobTypes, Payload, validated

from .bullmq_scripts import Scripts, blast

TITLE = "What a backlog costs"
ABOUT = (
    "Median time to add and to fetch one job while so many others wait, and the ratio to the shortest backlog. "
    "`bare`: BullMQ's scripts called by a plain client, jobs without priority (a list in Redis). `producer`: "
    "`Producer.enqueue` with id, signature and priority (a sorted set), and the worker's own fetch. A job is added "
    "and one is fetched in turn, so the backlog keeps its size. A ratio of about 1: the cost does not depend on it."
)
COLUMNS = {
    "add_us": less("add p50", "µs"),
    "add_ratio": less("to the shortest", "×"),
    "fetch_us": less("fetch p50", "µs"),
    "fetch_ratio": less("to the shortest", "×"),
    "add_p95_us": less("add p95", "µs"),
    "fetch_p95_us": less("fetch p95", "µs"),
}
ROUNDS = 1

QUICK = (1_000, 10_000, 100_000)
FULL = (*QUICK, 1_000_000)
QUEUE = "backlog"
BATCH = 1_000

Step = Callable[[int], Awaitable[object]]


class Nothing(Payload):
    number: int


async def nothing(ctx: JobContext, payload: Nothing) -> None:
    return None


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    return run(lab.url, sizes=lab.scale(QUICK, FULL), samples=lab.scale(500, 1_000))


def run(url: str, *, sizes: Sequence[int], samples: int) -> dict[str, dict[str, Value]]:
    """On an empty Redis, which it leaves empty; it holds up to 1 GB at a million jobs."""
    rows: dict[str, dict[str, Value]] = {}
    with redis.Redis.from_url(url, socket_timeout=60) as client:
        for name, way in (("bare", _bare), ("producer", _producer)):
            client.flushall()
            for row in asyncio.run(way(url, client, sizes, samples)):
                rows[f"{name}, {row.pop('waiting'):,} waiting"] = row
        client.flushall()
    return rows


async def _bare(url: str, client: redis.Redis, sizes: Sequence[int], samples: int) -> list[dict[str, Any]]:
    scripts = Scripts(client, QUEUE)
    add, take = scripts.add(), scripts.take()
    plain: Any = client

    async def fill(count: int) -> None:
        blast(url, add, count, connections=4, pipeline=250)

    async def one_add(_: int) -> object:
        return plain.execute_command(*add.argv)

    async def one_fetch(_: int) -> object:
        return plain.execute_command(*take.argv)

    def waiting() -> int:
        return int(client.llen(scripts.key["wait"]))

    return await _grow(sizes, samples, fill, one_add, one_fetch, waiting)


async def _producer(url: str, client: redis.Redis, sizes: Sequence[int], samples: int) -> list[dict[str, Any]]:
    jobs = JobTypes()
    jobs.register(name="nothing", payload=Nothing, handler=nothing, queue=QUEUE)
    producer = Producer(url, validated(jobs), signing(Signer(KEYS)), timeout=30)
    workers = worker_client(url, AutoPipeline)
    ledger = JobLedger(RedisBackend(QUEUE, RedisConnection(workers), prefix="bull"), 30_000, None, _raise)
    filled = 0

    def request(number: int) -> JobRequest:
        return JobRequest("nothing", {"number": number}, key=f"n-{number}")

    async def fill(count: int) -> None:
        nonlocal filled
        for first in range(filled, filled + count, BATCH):
            last = min(first + BATCH, filled + count)
            await producer.enqueue_many([request(number) for number in range(first, last)])
        filled += count

    async def one_add(number: int) -> object:
        return await producer.enqueue(request(10_000_000 + number))

    async def one_fetch(number: int) -> object:
        result = await ledger.take(f"token-{number}")
        assert result.fields is not None, "nothing was waiting"
        return result

    def waiting() -> int:
        return int(client.zcard(f"bull:{QUEUE}:prioritized"))

    try:
        return await _grow(sizes, samples, fill, one_add, one_fetch, waiting)
    finally:
        await producer.close()
        await workers.aclose()


async def _grow(
    sizes: Sequence[int],
    samples: int,
    fill: Callable[[int], Awaitable[None]],
    add: Step,
    fetch: Step,
    waiting: Callable[[], int],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    number = 0
    for size in sizes:
        await fill(size - waiting())
        times: dict[str, list[float]] = {"add": [], "fetch": []}
        for _ in range(samples):
            number += 1
            for name, step in (("add", add), ("fetch", fetch)):
                began = time.perf_counter()
                await step(number)
                times[name].append((time.perf_counter() - began) * 1e6)
        if waiting() != size:
            raise RuntimeError(f"{waiting()} jobs wait instead of {size}: the figures would be of another backlog")
        row: dict[str, Any] = {"waiting": size}
        for name, measured in times.items():
            row[f"{name}_us"] = round(statistics.median(measured), 1)
            row[f"{name}_p95_us"] = round(statistics.quantiles(measured, n=20)[-1], 1)
            row[f"{name}_ratio"] = round(row[f"{name}_us"] / (rows or [row])[0][f"{name}_us"], 2)
        rows.append(row)
    return rows


def _raise(error: BaseException) -> None:
    raise error

"""Producers and workers of the flow proof, as a flow and (naive) as steps that enqueue the next one by hand."""

import argparse
import asyncio
import json
import os

import uvloop
from bullmq import Queue
from sqlalchemy import Column, Integer, String, Table

from harness.pipelines import full_pipeline, full_producer
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import metadata
from studyhall.patterns.flow import chain
from studyhall.patterns.idempotency import Inbox, fingerprint
from studyhall.patterns.observability import configure_logging
from studyhall.patterns.pipeline import Done
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.shutdown import run_until_signalled
from studyhall.patterns.typed_jobs import JobTypes, Payload

STEPS = ("extract", "graph", "quiz", "explain")
QUEUE, NAIVE = "flows", "chains"
done = Table(
    "steps_done",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("chain", Integer),
    Column("step", String(20)),
)


class Step(Payload):
    chain: int


def say(event, **fields):
    print(json.dumps({"event": event, "pid": os.getpid(), **fields}), flush=True)


def job_types():
    async def handler(ctx, payload: Step):
        await asyncio.sleep(0.02)

        async def save(tx):
            await tx.execute(done.insert().values(chain=payload.chain, step=ctx.name))

        return Done({"step": ctx.name}, save)

    jobs = JobTypes()
    for name in STEPS:
        jobs.register(name=name, payload=Step, handler=handler, queue=QUEUE)
    return jobs


def flow_of(number):
    return chain(*(JobRequest(name, {"chain": number}, key=f"chain-{number}") for name in STEPS))


async def work(options):
    store = open_store(options.store)
    queue = Queue(NAIVE, {"connection": producer_client(options.redis)})

    async def by_hand(job, _token):
        """The usual chain: do the work once (an inbox even), then add the next step."""
        number = job.data["chain"]

        async def effect(tx):
            await tx.execute(done.insert().values(chain=number, step=job.name))

        inbox = Inbox(store, job.name)
        if await inbox.seen(str(number), fingerprint(job.data)):
            return  # done before, so there is nothing to do
        await asyncio.sleep(0.02)
        await inbox.once(str(number), fingerprint(job.data), effect)
        say("done", step=job.name)
        await asyncio.sleep(0.02)  # whatever stands between the effect and the next add
        following = STEPS.index(job.name) + 1
        if following < len(STEPS):
            await queue.add(
                STEPS[following], {"chain": number}, {"jobId": f"{STEPS[following]}.{number}", "attempts": 3}
            )

    workers = [
        ReliableWorker(name, processor, url=options.redis, lock_duration=1.5, stalled_interval=0.3, concurrency=8)
        for name, processor in ((QUEUE, full_pipeline(job_types(), store)), (NAIVE, by_hand))
    ]

    async def ready():
        for worker in workers:
            await worker.ready()
        say("ready")

    await run_until_signalled(workers, grace=5, on_ready=ready)
    await close(store)


async def produce(options):
    """Add flows, and the same jobs one by one, as fast as possible until killed."""
    producer = full_producer(job_types(), options.redis, timeout=20)
    queue = producer.queue(NAIVE)
    say("ready")
    for number in range(options.start, 10**9):
        for name in STEPS:
            await queue.add(name, {"chain": number}, {"jobId": f"{name}.{number}"})
            await asyncio.sleep(0.01)  # so that most kills fall between two adds
        await producer.enqueue(flow_of(number))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["work", "produce"])
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", default="")
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    configure_logging("ERROR")
    uvloop.run(work(options) if options.role == "work" else produce(options))


if __name__ == "__main__":
    main()

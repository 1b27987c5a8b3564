"""A producer and a worker with spans to a file each; the worker's job enqueues a child job."""

import argparse
import asyncio
from pathlib import Path

import uvloop
from opentelemetry import trace

from harness.pipelines import full_pipeline, full_producer
from studyhall.patterns import tracing
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.errors import Permanent, Transient
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.observability import configure_logging
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.shutdown import run_until_signalled
from studyhall.patterns.typed_jobs import JobTypes, Payload

SECRET = "sk-live-4242424242424242"


class Mail(Payload):
    to: str


def job_types():
    async def order(ctx, payload: Mail):
        await ctx.services.enqueue(JobRequest("receipt", {"to": payload.to}, key=ctx.key))

    async def receipt(ctx, payload: Mail):
        if ctx.attempt == 1:
            raise Transient(f"no route to {payload.to} with {SECRET}")

    async def broken(ctx, payload: Mail):
        raise Permanent(f"{payload.to} refused {SECRET}")

    jobs = JobTypes()
    quick = RetryPolicy(0.01, 0.02, 3)
    jobs.register(name="order", payload=Mail, handler=order, queue="orders", retry=quick)
    jobs.register(name="receipt", payload=Mail, handler=receipt, queue="mails", retry=quick)
    jobs.register(name="broken", payload=Mail, handler=broken, queue="mails", retry=quick)
    return jobs


async def produce(options):
    producer = full_producer(job_types(), options.redis, timeout=10)
    with trace.get_tracer("api").start_as_current_span("POST /orders"):
        await producer.enqueue(JobRequest("order", {"to": "ann@example.com"}, key="k1"))
        await producer.enqueue(JobRequest("broken", {"to": "ann@example.com"}, key="k1"))
    await producer.close()


async def work(options):
    store = open_store(options.store)
    await create_all(store)
    producer = full_producer(job_types(), options.redis, timeout=10)
    pipeline = full_pipeline(job_types(), store, services=producer)
    workers = [ReliableWorker(queue, pipeline, url=options.redis) for queue in job_types().queues]

    async def ready():
        for worker in workers:
            await worker.ready()
        print("ready", flush=True)

    await run_until_signalled(workers, grace=5, on_ready=ready)
    await producer.close()
    await close(store)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["produce", "work"])
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", default="")
    parser.add_argument("--spans", type=Path, required=True)
    options = parser.parse_args()
    configure_logging("ERROR")
    provider = tracing.to_file(options.spans, options.role)
    runner = uvloop.run if options.role == "work" else asyncio.run
    runner(work(options) if options.role == "work" else produce(options))
    provider.shutdown()


if __name__ == "__main__":
    main()

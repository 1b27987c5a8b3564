"""The whole reliable pipeline as the app runs it: signature, validation, crash budget, deadline, idempotency marker and
result in SQLite, one log line and metrics for every job; the producer validates, signs and refuses failed twins."""

import asyncio
import ctypes
import gc
import os

import contest
import uvloop
from sqlalchemy import text

from studyhall.quick_imports import quick_imports

with quick_imports():  # as studyhall/cli.py does
    from studyhall.patterns.backpressure import max_age
    from studyhall.patterns.bullmq_worker import ReliableWorker
    from studyhall.patterns.checkpoint import checkpointed
    from studyhall.patterns.claim_check import max_payload, small
    from studyhall.patterns.core.errors import Permanent
    from studyhall.patterns.core.open_store import create_all, open_store
    from studyhall.patterns.deadline import within_deadline
    from studyhall.patterns.idempotency.once import inboxes, once
    from studyhall.patterns.observability import configure_logging, logged
    from studyhall.patterns.observability.metrics import JobMetrics, measured
    from studyhall.patterns.pipeline import Done, JobContext, Pipeline
    from studyhall.patterns.producer import JobRequest, Producer
    from studyhall.patterns.progress import reporting
    from studyhall.patterns.signed_payload import Signer, signed, signing
    from studyhall.patterns.stall_budget import crash_budget
    from studyhall.patterns.store_gate import store_gate
    from studyhall.patterns.tracing import traced, tracing_adds
    from studyhall.patterns.typed_jobs import JobTypes, Payload, typed, validated

KEYS = ["a-signing-key-for-the-benchmark-0123456789"]
MAX_PAYLOAD = 256 * 1024  # above the default of 64 KB, for the row with 100 KB
given = contest.options()


class Job(Payload):
    n: int
    sent: int
    kind: str
    body: str


async def handle(ctx: JobContext, payload: Job) -> Done | dict[str, int]:
    if payload.kind == "row":
        await asyncio.sleep(0.040)
        row = text("INSERT INTO effects (job) VALUES (:job)"), {"job": payload.n}
        # the effect and its marker share a transaction
        return Done({"number": payload.n}, save=lambda tx: tx.execute(*row))
    try:
        await contest.work_async(payload.__dict__)
    except contest.Failed as error:  # must fail at once, not after its attempts
        raise Permanent(str(error)) from None
    return {"number": payload.n}


def job_types() -> JobTypes:
    jobs = JobTypes()
    jobs.register(name="job", payload=Job, handler=handle, queue=given.queue, deadline=2 * contest.HOLD_SECONDS)
    return jobs


async def worker() -> None:
    seconds = contest.takeover(9)
    configure_logging("INFO", stream=open("jobs.log", "a"))  # noqa: SIM115
    store = open_store(os.environ.get("BENCH_STORE_URL") or f"sqlite:///{os.environ['BENCH_STORE']}")
    await create_all(store)
    pipeline = Pipeline(
        logged(),
        measured(JobMetrics()),
        traced(),
        max_payload(MAX_PAYLOAD),
        signed(Signer(KEYS)),
        typed(job_types()),
        crash_budget(),
        max_age(),
        store_gate(),
        once(inboxes(store)),
        within_deadline(),
        reporting(),
        checkpointed(store),
    )
    reliable = ReliableWorker(
        given.queue,
        pipeline,
        url=given.url,
        concurrency=given.concurrency,
        lock_duration=seconds * 5 / 6,
        stalled_interval=seconds / 6,
    )
    gc.freeze()  # both as the app does
    ctypes.CDLL(None).malloc_trim(0)
    await reliable.run()


async def enqueue() -> None:
    steps = (validated(job_types()), tracing_adds(), signing(Signer(KEYS)), small(MAX_PAYLOAD))
    producer = Producer(given.url, *steps, timeout=30)
    await producer.redis.ping()

    def request(job: contest.Job) -> JobRequest:
        return JobRequest("job", job, key=f"n-{job['n']}", delay=given.delay or 0)

    await contest.fill_async(
        given,
        lambda job: producer.enqueue(request(job)),
        lambda chunk: producer.enqueue_many([request(job) for job in chunk]),
    )
    await producer.close()


uvloop.run(worker() if given.verb == "worker" else enqueue())
os._exit(0)

"""A worker as a user of the patterns would write it, or (--naive) as it is usually published."""

import argparse
import asyncio
import json
import logging
import os
import signal

import uvloop
from bullmq import Worker
from ledger_jobs import KEYS, QUEUE, Entry, die_once, job_types, naive_ledger

from harness.pipelines import full_pipeline
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.observability import configure_logging
from studyhall.patterns.shutdown import run_until_signalled
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.stall_budget import CRASH_LIMIT


def say(event, **fields):
    print(json.dumps({"event": event, "pid": os.getpid(), **fields}), flush=True)


async def reliable(options):
    store = open_store(options.store)
    signer = Signer(KEYS)
    pipeline = full_pipeline(
        job_types(), store, signer=signer, services=options.scratch, crash_limit=options.crash_limit
    )

    async def processor(job, token):
        say("start", job=job.id, attempts_made=job.attemptsMade, stalled=job.stalledCounter)
        result = await pipeline(job, token)
        die_once(options.scratch, "after-effect-before-ack", Entry.model_validate(job.data["payload"]))
        return result

    worker = ReliableWorker(
        QUEUE,
        processor,
        url=options.redis,
        concurrency=options.concurrency,
        **({"lock_duration": options.lock, "stalled_interval": options.stalled} if options.lock else {}),
    )
    worker.on("stalled", lambda job_id: say("stalled", job=job_id))
    worker.on("lost", lambda job: say("lost", job=job.id))

    def completed(job, _result):
        die_once(options.scratch, "after-ack", Entry.model_validate(job.data["payload"]))

    worker.on("completed", completed)

    async def ready():
        await worker.ready()
        say("ready")

    released = await run_until_signalled([worker], grace=options.grace, on_ready=ready)
    await close(store)
    say("stopped", released=released)


async def naive(options):
    store = open_store(options.store)

    async def processor(job, _token):
        payload = Entry.model_validate(job.data["payload"])
        await asyncio.sleep(payload.seconds / 2)
        async with begin(store) as tx:
            await tx.execute(naive_ledger.insert().values(entry=payload.entry))
        await asyncio.sleep(payload.seconds / 2)
        return {"entry": payload.entry}

    worker = Worker(
        QUEUE,
        processor,
        {
            "connection": options.redis,
            "concurrency": options.concurrency,
            "lockDuration": int(options.lock * 1000),
            "stalledInterval": int(options.stalled * 1000),
        },
    )
    worker.on("error", lambda *_: None)
    say("ready")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await worker.close(force=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--scratch", default="")
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--lock", type=float, default=0.0, help="0: the worker's defaults")
    parser.add_argument("--stalled", type=float, default=0.5)
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--crash_limit", type=int, default=CRASH_LIMIT)
    parser.add_argument("--naive", action="store_true")
    options = parser.parse_args()
    configure_logging("INFO")
    logging.getLogger("jobs").setLevel("ERROR")
    uvloop.run(naive(options) if options.naive else reliable(options))


if __name__ == "__main__":
    main()

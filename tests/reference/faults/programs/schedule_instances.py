"""One instance of an application with a schedule; the tests start several and kill them.

ours:      worker, pipeline and schedules as the reference app uses them
cron-lock: what is usually published: every instance wakes at the tick, SET NX takes a lock, DEL releases it
"""

import argparse
import asyncio
import json
import sys
import time

from sqlalchemy import BigInteger, Column, Integer, Table, insert

from harness.pipelines import full_pipeline, full_producer
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.core.store import metadata
from studyhall.patterns.pipeline import Done
from studyhall.patterns.schedule import Schedule, ScheduleKeeper, Schedules, ticking
from studyhall.patterns.schedule.slots import tick_of
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload

KEYS = ["a key of the tests, 32 bytes long"]
QUEUE = "ticks"

tick_effects = Table(
    "tick_effects", metadata, Column("id", Integer, primary_key=True), Column("slot", BigInteger, nullable=False)
)


class Work(Payload):
    seconds: float = 0.05


def say(**event):
    print(json.dumps(event), flush=True)


async def tick(ctx, payload: Work):
    due = tick_of(ctx.job_id, ctx.job.data)
    slot = due.slot if due else 0
    # By the real clock, whatever `--ahead` has made of time.time().
    say(event="start", slot=slot, early=slot / 1000 - time.clock_gettime(time.CLOCK_REALTIME))
    await asyncio.sleep(payload.seconds)

    async def save(tx):
        await tx.execute(insert(tick_effects).values(slot=slot))

    return Done({"slot": slot}, save)


def job_types():
    jobs = JobTypes()
    policy = RetryPolicy(base=0.1, cap=0.5, attempts=3)
    jobs.register(name="tick", payload=Work, handler=tick, queue=QUEUE, retry=policy)
    return jobs


def schedules(jobs, *, version=0, also=None, **options):
    declared = [Schedule(**{"id": "beat", "job": "tick", **options})]
    if also:
        declared.append(Schedule(also, "tick", every=3600))
    return Schedules(jobs, declared, version=version, lease=1.0, sign=Signer(KEYS).sign)


def set_clock_ahead(seconds):
    """The time of day of this process, as on a machine whose clock was set wrong."""
    real = time.time
    time.time = lambda: real() + seconds


async def ours(args):
    store = open_store(args.store)
    await create_all(store)
    jobs, signer = job_types(), Signer(KEYS)
    producer = full_producer(jobs, args.redis, signer=signer, timeout=10)
    when = {"cron": args.cron} if args.cron else {"every": args.every}
    more = {"payload": {"seconds": args.seconds}, "overlap": args.overlap}
    declared = schedules(jobs, version=args.version, also=args.also, **when, **more)
    await declared.apply(producer, store)
    pipeline = full_pipeline(jobs, store, ticking(declared, store), signer=signer)
    worker = ReliableWorker(QUEUE, pipeline, url=args.redis, lock_duration=1.0, stalled_interval=0.3, concurrency=20)
    running = asyncio.create_task(worker.run())
    await worker.ready()
    say(event="ready")
    if args.heal:
        await ScheduleKeeper(declared, producer, store, every=args.heal).run()
    await running


async def cron_lock(args):
    redis = producer_client(args.redis)
    await redis.ping()
    say(event="ready")
    tasks = set()

    async def run(number):
        if await redis.set("cron-lock", "1", nx=True, px=int(args.ttl * 1000)):
            await redis.rpush("cron-runs", number)
            await asyncio.sleep(args.seconds)
            await redis.delete("cron-lock")

    number = int((time.time() + args.skew) / args.every) + 1
    for tick_number in range(number, number + args.ticks):
        await asyncio.sleep(max(0, tick_number * args.every - (time.time() + args.skew)))
        tasks.add(asyncio.create_task(run(tick_number)))
    await asyncio.gather(*tasks)
    say(event="done")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ours", "cron-lock"])
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", default="")
    parser.add_argument("--every", type=float, default=0.3)
    parser.add_argument("--cron")
    parser.add_argument("--version", type=int, default=0)
    parser.add_argument("--also")
    parser.add_argument("--heal", type=float, default=0.0)
    parser.add_argument("--ahead", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--overlap", default="queue")
    parser.add_argument("--ttl", type=float, default=1.0)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--ticks", type=int, default=10)
    args = parser.parse_args()
    set_clock_ahead(args.ahead)
    asyncio.run(ours(args) if args.kind == "ours" else cron_lock(args))


if __name__ == "__main__":
    sys.exit(main())

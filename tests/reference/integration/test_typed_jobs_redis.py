"""Typed jobs on a real queue: what the usual if/else worker makes of a job that it does not know."""

import asyncio
from typing import Any

from bullmq import Queue, UnrecoverableError, Worker
from redis.asyncio import Redis

from harness.waiting import until
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.typed_jobs import JobTypes, Payload


class SendMail(Payload):
    to: str


BAD: list[tuple[str, Any]] = [
    ("send-mial", {"v": 1, "payload": {"to": "a"}}),  # unknown name
    ("send-mail", {"v": 9, "payload": {"to": "a"}}),  # unknown version
    ("send-mail", {"v": 1, "payload": {"too": "a"}}),  # malformed
    ("send-mail", {"to": "a"}),  # no envelope
]
GOOD = 4


async def test_a_job_nobody_knows_fails_at_once_where_the_if_else_worker_completes_it(redis_url, figures):
    done = {"naive": [], "typed": []}
    runs = {"naive": 0, "typed": 0}
    jobs = JobTypes()

    async def send(ctx, payload: SendMail):
        done[ctx].append(payload.to)

    jobs.register(name="send-mail", payload=SendMail, handler=send)

    async def naive(job, token):
        runs["naive"] += 1
        if job.name == "send-mail":
            to = job.data.get("payload", {}).get("to")
            if to:
                done["naive"].append(to)

    async def typed(job, token):
        runs["typed"] += 1
        try:
            job_type, payload = jobs.decode(job.name, job.data)
        except Permanent as error:
            raise UnrecoverableError(str(error)) from None
        await job_type.handler("typed", payload)

    counts = {}
    for name, processor in (("naive", naive), ("typed", typed)):
        connection = Redis.from_url(redis_url, decode_responses=True, socket_timeout=30)
        queue = Queue(f"{name}-mail", {"connection": connection})
        worker = Worker(queue.name, processor, {"connection": connection, "autorun": False})
        for job_name, data in BAD:
            await queue.add(job_name, data, {"attempts": 3})
        for number in range(GOOD):
            await queue.add("send-mail", jobs.encode("send-mail", SendMail(to=f"user{number}")), {"attempts": 3})
        running = asyncio.create_task(worker.run())

        async def finished(queue=queue):
            counts = await queue.getJobCounts("completed", "failed")
            return counts if sum(counts.values()) == len(BAD) + GOOD else None

        counts[name] = await until(finished, what=f"{name}: every job ended") or {}
        await worker.close()
        await running
        await queue.close()
        await connection.aclose()

    good = [f"user{number}" for number in range(GOOD)]
    assert counts["naive"]["completed"] == len(BAD) + GOOD, "the naive twin reports success for work it never did"
    assert sorted(done["naive"]) == sorted([*good, "a"]), "and it ran data of a version it does not know"
    assert counts["typed"] == {"completed": GOOD, "failed": len(BAD)}
    assert done["typed"] == good, "neighbours go on"
    assert runs["typed"] == len(BAD) + GOOD, "one run each: what can never pass consumes no attempt"
    figures(
        "typed-jobs",
        name="unknown and malformed jobs",
        bad_jobs=len(BAD),
        naive_completed_without_work=len(BAD) - 1,
        typed_failed_at_once=counts["typed"]["failed"],
        typed_neighbours_done=len(done["typed"]),
    )

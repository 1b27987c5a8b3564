"""ReliableWorker against killed, stopped and blocked processes and against a Redis that dies under it."""

import asyncio
import json
import random
import time
from pathlib import Path

import pytest

from harness.waiting import until
from harness.workers import at_work, counts, queue_at, until_counts

PROGRAM = Path(__file__).parent / "programs" / "worker_under_fault.py"
STOCK = {"lockDuration": 1000, "stalledInterval": 400, "maxStalledCount": 10, "concurrency": 5}
OURS = {"lock_duration": 1.0, "stalled_interval": 0.4}

pytestmark = pytest.mark.fault


class Child:
    """A worker process and its lines."""

    def __init__(self, spawn, port, kind, *, work="sleep", **more):
        spec = {"kind": kind, "port": port, "queue": kind, "work": work, "seconds": 0, **more}
        self.process = spawn(PROGRAM, json.dumps(spec))

    def lines(self, event):
        lines = (json.loads(line) for line in self.process.lines() if line.startswith("{"))
        return [line for line in lines if line["event"] == event]

    async def line(self, event, within=20):
        lines = await until(lambda: self.lines(event), within, f"{event!r} from {self.process}")
        return lines[0]


@pytest.mark.slow
async def test_jobs_of_a_killed_worker_start_elsewhere_within_ten_seconds(
    redis_server, redis_url, spawn, scale, figures
):
    """Everything at its default. The stock defaults (30 s lock, 30 s check) take about a minute."""
    took = []
    done = 0
    for _ in range(scale(1, 6)):
        victim = Child(spawn, redis_server.port, "reliable", seconds=600)
        await victim.line("ready")
        async with queue_at(redis_url, "reliable") as queue:
            await queue.addBulk([{"name": "job", "data": {}} for _ in range(20)])
            await until(lambda victim=victim: len(victim.lines("start")) == 20, 20, "all to run")
            survivor = Child(spawn, redis_server.port, "reliable", seconds=0)
            await survivor.line("ready")
            await asyncio.sleep(random.uniform(0, 2))  # anywhere between two renewals
            victim.process.kill()
            killed = time.time()
            assert victim.lines("end") == []
            await until(lambda s=survivor: len(s.lines("completed")) == 20, 30, "the survivor to do them")
            done += len({line["job"] for line in survivor.lines("completed")})
            took.append(max(line["at"] for line in survivor.lines("start")) - killed)
            assert all(line["attempts"] == 0 for line in survivor.lines("start"))
            survivor.process.kill()
            await queue.obliterate(True)
            await queue.resume()
    figures(
        "bullmq-worker",
        name="sigkill",
        kills=len(took),
        jobs=20 * len(took),
        lost=20 * len(took) - done,
        recovery=round(max(took), 1),
    )
    assert max(took) < 10.5  # ten, and the time a loaded machine takes to say so


@pytest.mark.slow
async def test_blocked_event_loop_keeps_its_locks(redis_server, redis_url, spawn, figures):
    """A CPU-bound processor: the stock worker cannot renew, another one runs the job meanwhile."""
    starts = {}
    for kind, options in (("stock", STOCK), ("reliable", OURS)):
        blocked = Child(spawn, redis_server.port, kind, work="block", seconds=3, options=options)
        await blocked.line("ready")
        async with queue_at(redis_url, kind) as queue:
            await queue.add("job", {})
            await blocked.line("start")
            other = Child(spawn, redis_server.port, kind, seconds=0, options=options)
            await other.line("ready")
            await blocked.line("end")
            await until(queue.getCompletedCount, 10, "the job to be completed")
        starts[kind] = len(blocked.lines("start")) + len(other.lines("start"))
        for child in (blocked, other):
            child.process.kill()
    figures("bullmq-worker", name="blocked-loop", runs=starts["reliable"], runs_stock=starts["stock"])
    assert starts == {"stock": 2, "reliable": 1}


@pytest.mark.slow
async def test_hung_event_loop_gives_its_jobs_up_and_does_not_report_them(redis_server, redis_url, spawn):
    """Renewing locks for a loop that hangs for good would hold its jobs forever."""
    hung = Child(spawn, redis_server.port, "reliable", work="block", seconds=5, options={**OURS, "hung_after": 1.0})
    other = Child(spawn, redis_server.port, "reliable", seconds=0, options=OURS)
    await hung.line("ready")
    async with queue_at(redis_url, "reliable") as queue:
        await other.line("ready")
        other.process.stop_signal()  # so that the worker that will hang gets the job
        await queue.add("job", {})
        await hung.line("start")
        other.process.cont()
        taken_over = await other.line("completed", 15)
        ended = await hung.line("end", 15)
        await hung.line("lost", 10)
    assert taken_over["at"] < ended["at"]
    assert hung.lines("completed") == []
    # Among them: what was on its way to Redis when the loop hung has timed out.
    errors = "\n".join(line["text"] for line in hung.lines("error"))
    assert "is no longer ours" in errors or "lock was lost" in errors


async def test_sigterm_under_load_loses_nothing_and_counts_no_stall(redis_server, redis_url, spawn, scale, figures):
    terms, jobs = scale(2, 20), scale(400, 3000)
    async with queue_at(redis_url, "reliable") as queue:
        for first in range(0, jobs, 500):
            some = [{"name": "job", "data": {}} for _ in range(min(500, jobs - first))]
            await queue.addBulk(some)
        children = []
        for _ in range(terms):
            child = Child(
                spawn, redis_server.port, "reliable", seconds=0.2, grace=0.1, options={**OURS, "concurrency": 20}
            )
            children.append(child)
            await until(lambda child=child: len(child.lines("start")) > 20, 20, "it to be at work")
            child.process.terminate()
            assert await child.process.exited(20) == 0
            assert (await counts(queue)).get("active", 0) == 0
        async with at_work("reliable", _nothing, url=redis_url):
            await until_counts(queue, {"completed": jobs}, 60, "all to complete")
        lost = jobs - await queue.getCompletedCount()
    released = sum(len(child.lines("released")) for child in children)
    with redis_server.client() as client:
        stalls = [line for _, line in client.xrange("bull:reliable:events") if line["event"] == "stalled"]
    figures("bullmq-worker", name="sigterm", terms=terms, jobs=jobs, lost=lost, stalled=len(stalls))
    assert released > 0
    assert stalls == []


@pytest.mark.slow
async def test_redis_killed_under_load_loses_no_job_and_work_resumes(make_redis, scale, seed, figures):
    """SIGKILL of Redis itself, again and again (AOF always, so that what it acknowledged is there afterwards)."""
    choose = random.Random(seed)
    own_redis = make_redis(appendfsync="always")
    jobs, kills = scale(600, 5000), scale(3, 10)
    runs = {}
    resumed = []
    last_run = time.monotonic()

    async def process(job, token):
        nonlocal last_run
        runs[job.id] = runs.get(job.id, 0) + 1
        last_run = time.monotonic()
        await asyncio.sleep(0.02)

    errors = []
    async with queue_at(own_redis.url, "q") as queue:
        for first in range(0, jobs, 500):
            await queue.addBulk([{"name": "job", "data": {}} for _ in range(min(500, jobs - first))])
        options = {"lock_duration": 2.0, "stalled_interval": 0.5, "concurrency": scale(5, 20)}
        async with at_work("q", process, url=own_redis.url, on_error=errors.append, **options):
            for kill in range(kills):
                target = jobs * (kill + 1) // (kills + 2)
                await until(lambda target=target: len(runs) >= target, 60, "work to go on")
                await asyncio.sleep(choose.random() * 0.05)
                own_redis.kill()
                await asyncio.sleep(choose.random())
                own_redis.restart()
                back = time.monotonic()
                await until(lambda back=back: last_run > back, 20, "work to resume")
                resumed.append(last_run - back)
            await until_counts(queue, {"completed": jobs}, 60, "all to complete")
    again = sum(count - 1 for count in runs.values())
    figures("bullmq-worker", name="redis-kills", kills=kills, jobs=jobs, lost=jobs - len(runs), run_again=again,
            resumed=round(max(resumed), 2))  # fmt: skip
    assert len(runs) == jobs
    assert max(resumed) < 10
    # A kill can cost what was under way: running jobs and those in lost replies.
    assert again <= kills * 2 * options["concurrency"]
    assert errors


async def test_outage_longer_than_a_lock_cancels_what_ran(own_redis):
    """All locks are gone: what ran through the outage must not count as completed; all of it runs again."""
    ended = []
    lost = []

    async def process(job, token):
        first = job.attemptsStarted == 1
        await asyncio.sleep(60 if first else 0)
        ended.append(job.id)

    async with queue_at(own_redis.url, "q") as queue:
        options = {"lock_duration": 1.0, "stalled_interval": 0.3, "on_error": lambda error: None}
        async with at_work("q", process, url=own_redis.url, **options) as worker:
            worker.on("lost", lambda job: lost.append(job.id))
            await queue.addBulk([{"name": "job", "data": {}} for _ in range(5)])
            await until(lambda: len(worker.active) == 5, 10, "all to run")
            await asyncio.sleep(1.2)  # AOF everysec: let the jobs reach the disk
            own_redis.kill()
            await asyncio.sleep(1.5)
            own_redis.restart()
            await until_counts(queue, {"completed": 5}, 20, "all to complete")
    assert sorted(lost) == sorted(ended)
    assert len(ended) == 5


async def _nothing(job, token):
    pass

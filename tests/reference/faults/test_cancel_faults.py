"""Cancelling from another process: final, without effect, whatever state the job is in and whoever dies."""

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select

from harness.pipelines import full_producer
from harness.waiting import until
from studyhall.patterns import dead_letter
from studyhall.patterns.cancel import NoSuchJob, cancel
from studyhall.patterns.core.job import cancelled
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import read
from studyhall.patterns.producer import JobRef, JobRequest

pytestmark = pytest.mark.fault

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))

import cancel_worker  # noqa: E402


class Bench:
    def __init__(self, redis_url, directory, spawn):
        self.redis_url, self.spawn = redis_url, spawn
        self.store_url = f"sqlite:///{directory / 'cancel.db'}"

    async def worker(self, *more):
        program = PROGRAMS / "cancel_worker.py"
        worker = self.spawn(program, f"--redis={self.redis_url}", f"--store={self.store_url}", *more)
        await worker.line('"ready"')
        return worker

    async def add(self, key, **options):
        seconds = options.pop("seconds", 0.0)
        payload = {"seconds": seconds, "seat": options.pop("seat", "")}
        return await self.producer.enqueue(JobRequest("step-one", payload, key=key, **options))

    async def cancel(self, ref):
        done = await cancel(self.producer.redis, self.store, ref.queue, ref.id, "the user changed her mind")
        return [stage.state for stage in done]

    async def result(self, ref, limit=20):
        """The result of the job once it has ended; fails if it failed."""
        queue = self.producer.queue(ref.queue)

        async def ended():
            return await queue.getJobState(ref.id) in ("completed", "failed")

        await until(ended, limit, f"{ref.id} ends")
        job = await queue.getJob(ref.id)
        assert job.failedReason is None, job.failedReason
        return job.returnvalue

    async def effects(self):
        async with read(self.store) as connection:
            return Counter((await connection.scalars(select(cancel_worker.effects.c.job))).all())

    async def dead_letters(self):
        await dead_letter.sweep([cancel_worker.QUEUE], self.producer.redis, self.store)
        return len(await dead_letter.list_dead_letters(self.store))


@pytest.fixture
async def bench(redis_url, tmp_path, spawn):
    made = Bench(redis_url, tmp_path, spawn)
    made.store = open_store(made.store_url)
    await create_all(made.store)
    made.producer = full_producer(cancel_worker.job_types(), redis_url, timeout=10)
    yield made
    await made.producer.close()
    await close(made.store)


async def test_an_active_job_is_stopped_and_stays_cancelled_where_the_naive_flag_comes_back_as_a_retry(bench, figures):
    worker = await bench.worker()
    ref = await bench.add("a", seconds=30)
    await worker.line('"start"')
    asked = time.monotonic()
    assert await bench.cancel(ref) == ["stopping"]
    assert cancelled(await bench.result(ref)) == "the user changed her mind"
    took = time.monotonic() - asked
    assert took < 5
    effects = await bench.effects()
    assert effects == {}
    assert await bench.dead_letters() == 0
    starts = len([line for line in worker.lines() if '"start"' in line])
    assert starts == 1, "no retry"
    worker.close()

    naive = await bench.worker("--naive")
    queue, redis = bench.producer.queue("work"), bench.producer.redis
    data = {"payload": {"seconds": 1.0}}
    await queue.add("step-one", data, {"jobId": "n", "attempts": 3, "backoff": {"type": "fixed", "delay": 50}})
    await naive.line('"start"')
    await redis.set("cancel:n", 1)

    async def done():
        return bool((await bench.effects())["n"])

    await until(done, 20, "the cancelled job did its work all the same")
    naive_starts = len([line for line in naive.lines() if '"start"' in line])
    assert naive_starts == 2
    figures(
        "cancel",
        name="active",
        stopped_after_ms=round(1000 * took),
        starts=starts,
        effects=len(effects),
        naive_starts=naive_starts,
        naive_effects=(await bench.effects())["n"],
    )


async def test_waiting_and_delayed_jobs_never_run_and_end_at_once(bench):
    waiting = await bench.add("waiting")
    planned = await bench.add("planned", delay=3600)
    neighbour = await bench.add("neighbour")
    assert await bench.cancel(waiting) == ["cancelled"]
    assert await bench.cancel(planned) == ["cancelled"]
    assert await bench.cancel(planned) == ["cancelled"], "asking twice changes nothing"
    worker = await bench.worker()
    for ref in (waiting, planned):
        assert cancelled(await bench.result(ref))
    assert await bench.result(neighbour) == {"done": neighbour.id}
    assert await bench.effects() == {neighbour.id: 1}
    assert [line for line in worker.lines() if '"start"' in line and neighbour.id not in line] == []
    assert await bench.dead_letters() == 0


async def test_too_late_is_answered_and_the_result_stands(bench):
    ref = await bench.add("fast")
    await bench.worker()
    assert await bench.result(ref) == {"done": ref.id}
    assert await bench.cancel(ref) == ["too-late"]
    assert await bench.effects() == {ref.id: 1}
    with pytest.raises(NoSuchJob):
        await cancel(bench.producer.redis, bench.store, "work", "step-one.unknown", "why")


async def test_cancellations_at_any_moment_leave_effect_or_cancellation_never_both(bench, scale, seed, figures):
    jobs, rng = scale(120, 600), random.Random(seed)
    await bench.worker()
    await bench.worker()
    refs = []
    answers = {}

    async def user(numbers):
        """Changes her mind after as long as the work takes, on average."""
        for number in numbers:
            ref = await bench.add(f"r{number}", seconds=rng.random() * 0.8)
            refs.append(ref)
            await asyncio.sleep(rng.random() * 0.8)
            answers[ref.id] = (await bench.cancel(ref))[0]

    # Not all at once: a producer's client has 64 connections, and waits 1.5 s for one.
    await asyncio.gather(*(user(range(first, jobs, 30)) for first in range(30)))
    results = {ref.id: await bench.result(ref) for ref in refs}
    effects = await bench.effects()
    wrong = [
        job
        for job, result in results.items()
        if effects[job] != (0 if cancelled(result) else 1) or (answers[job] == "too-late") != (effects[job] == 1)
    ]
    assert wrong == []
    assert 0 < len(effects) < jobs, "all went one way: this run proves nothing"
    assert await bench.dead_letters() == 0
    figures(
        "cancel", name="races", jobs=jobs, done=len(effects), cancelled=jobs - len(effects), both_or_neither=len(wrong)
    )


async def test_a_worker_killed_while_its_job_is_cancelled_leaves_a_cancelled_job(bench):
    worker = await bench.worker()
    ref = await bench.add("victim", seconds=30)
    await worker.line('"start"')
    worker.stop_signal()  # it cannot notice
    assert await bench.cancel(ref) == ["stopping"]
    worker.kill()
    successor = await bench.worker()
    assert cancelled(await bench.result(ref)), "the job came back as stalled and ended as cancelled"
    assert [line for line in successor.lines() if '"start"' in line] == []
    assert await bench.effects() == {}


async def test_a_frozen_worker_that_wakes_up_finished_cannot_take_the_cancellation_back(bench):
    worker = await bench.worker()
    ref = await bench.add("frozen", seconds=0.4)
    await worker.line('"start"')
    worker.stop_signal()
    assert await bench.cancel(ref) == ["stopping"]
    await asyncio.sleep(0.5)  # its work would be done by now
    worker.cont()
    assert cancelled(await bench.result(ref))
    assert await bench.effects() == {}


async def test_what_was_done_outside_is_undone_by_the_handler(bench, tmp_path):
    seat = tmp_path / "seat"
    worker = await bench.worker()
    ref = await bench.add("seat", seconds=30, seat=str(seat))
    await worker.line('"start"')
    await until(seat.exists, what="the seat is taken")
    await bench.cancel(ref)
    assert cancelled(await bench.result(ref))
    assert not seat.exists()

    # A shutdown is not a cancellation: the seat stays, the job goes on elsewhere.
    other = await bench.add("other", seconds=2.0, seat=str(seat))
    await until(seat.exists, what="the seat is taken")
    worker.terminate()
    assert await worker.exited(20) == 0
    assert seat.exists()
    await bench.worker()
    assert await bench.result(other) == {"done": other.id}


async def test_cancelling_one_stage_cancels_its_whole_flow(bench):
    first = JobRequest("step-one", {"seconds": 30}, key="doc")
    second = JobRequest("step-two", {}, key="doc", children=[first])
    root = await bench.producer.enqueue(JobRequest("step-three", {}, key="doc", children=[second]))
    worker = await bench.worker()
    await worker.line('"start"')
    stage = JobRef("work", "step-one", "step-one.doc", "doc")
    assert await bench.cancel(stage) == ["cancelled", "cancelled", "stopping"]
    assert cancelled(await bench.result(root)), "the last stage ended, and nothing waits forever"
    assert len([line for line in worker.lines() if '"start"' in line]) == 1
    assert await bench.effects() == {}
    counts = await bench.producer.queue("work").getJobCounts()
    assert (counts["waiting-children"], counts["failed"], counts["completed"]) == (0, 0, 3)


async def test_a_cancelled_request_stays_cancelled_when_it_is_delivered_again(bench):
    ref = await bench.add("again")
    await bench.cancel(ref)
    await bench.worker()
    assert cancelled(await bench.result(ref))
    queue = bench.producer.queue("work")
    with contextlib.suppress(Exception):
        await queue.remove(ref.id)  # retention forgot it
    again = await bench.add("again")
    assert cancelled(await bench.result(again)), "the marker in the database remembers"
    assert await bench.effects() == {}

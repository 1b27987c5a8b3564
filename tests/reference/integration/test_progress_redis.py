"""15,000 reports through a job: milestones arrive, and nobody's completion is pushed out of the event stream."""

import json

from harness.pipelines import JobSetup
from harness.waiting import until
from harness.workers import at_work, queue_at
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

REPORTS, STAGES, QUIET = 15_000, 5, 6


class Import(Payload):
    rows: int


async def events(redis, queue):
    return [fields for _, fields in await redis.xrange(f"bull:{queue}:events")]


async def test_progress_per_row_keeps_milestones_and_everybody_elses_events(redis_url, tmp_path, figures):
    async def naive(job, _token):
        for row in range(job.data["rows"]):
            await job.updateProgress({"stage": str(row * STAGES // REPORTS), "percent": 100 * row / REPORTS})

    async with queue_at(redis_url, "naive") as queue:
        async with at_work("naive", naive, url=redis_url, concurrency=1):
            for rows in (*[0] * QUIET, REPORTS):
                await queue.add("import", {"rows": rows}, {})
            await until(lambda: _completed(queue, QUIET + 1), 120, "the naive import is done", every=0.2)
        seen = await events(queue.client if hasattr(queue, "client") else queue.backend.conn, "naive")
    naive_completed = sum(event["event"] == "completed" for event in seen)

    async def handler(ctx, payload: Import):
        for row in range(payload.rows):
            await ctx.progress(f"stage {row * STAGES // REPORTS}", 100 * row / REPORTS, f"row {row}", row=row)
        await ctx.progress("saved", 100)

    jobs = JobTypes()
    jobs.register(name="import", payload=Import, handler=handler, queue="ours")
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        requests = [JobRequest("import", {"rows": 0 if n < QUIET else REPORTS}, key=f"k{n}") for n in range(QUIET + 1)]
        async with setup.working(concurrency=1):
            for request in requests:
                await setup.producer.enqueue(request)
            assert set(await setup.ended(*requests, timeout=120)) == {"completed"}
        seen = await events(setup.producer.redis, "ours")
        last = (await setup.job(requests[-1])).progress
    ours = [json.loads(event["data"]) for event in seen if event["event"] == "progress"]
    completed = sum(event["event"] == "completed" for event in seen)
    stages = [stage for stage in dict.fromkeys(update["stage"] for update in ours) if stage != "saved"]

    assert naive_completed < QUIET + 1, "the naive twin evicted nothing: this run proves nothing"
    assert completed == QUIET + 1, "every completion is still in the stream"
    assert stages == [f"stage {n}" for n in range(STAGES)], "no milestone is missing"
    assert (last["stage"], last["percent"]) == ("saved", 100)
    assert len(ours) < 1_000
    figures(
        "progress",
        name="event-stream",
        reports=REPORTS,
        updates_sent=len(ours),
        stages_seen=len(stages),
        completions=QUIET + 1,
        completions_seen=completed,
        naive_completions_seen=naive_completed,
    )


async def _completed(queue, number):
    return bool((await queue.getJobCounts("completed"))["completed"] == number)


async def test_a_job_whose_progress_cannot_be_written_still_completes(redis_url, tmp_path):
    async def handler(ctx, payload: Import):
        ctx.job.updateProgress = None  # any error at all
        ctx.progress._send = ctx.job.updateProgress
        await ctx.progress("one", 10)
        await ctx.progress("two", 20)
        return {"rows": payload.rows}

    jobs = JobTypes()
    jobs.register(name="import", payload=Import, handler=handler, queue="ours")
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup, setup.working():
        request = JobRequest("import", {"rows": 1}, key="k")
        await setup.producer.enqueue(request)
        assert await setup.ended(request) == ["completed"]

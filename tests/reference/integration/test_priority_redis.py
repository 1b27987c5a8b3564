"""Priority on a real queue, beside the job with `priority: 1` that runs last."""

from harness.pipelines import JobSetup
from harness.waiting import until
from harness.workers import at_work, queue_at
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

BACKLOG = 300


class Item(Payload):
    n: int


async def test_critical_is_next_in_a_backlog_where_priority_one_runs_last(redis_url, tmp_path, figures):
    naive = []

    async def note(job, _token):
        naive.append(job.name)

    async with queue_at(redis_url, "naive") as queue:
        for n in range(BACKLOG):
            await queue.add(f"{n}", {}, {})  # as most code adds its jobs: no priority
        await queue.add("urgent", {}, {"priority": 1})
        async with at_work("naive", note, url=redis_url, concurrency=1):
            await until(lambda: len(naive) > BACKLOG, 60, "the naive backlog is done")

    ran = []

    async def handler(ctx, payload: Item):
        ran.append(payload.n)

    jobs = JobTypes()
    jobs.register(name="item", payload=Item, handler=handler, queue="tiers")
    tiers = {"low": 10_000, "normal": 20_000, "high": 30_000, "critical": 40_000}
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        for tier in ("normal", "low", "high"):  # the backlog, in no order of importance
            await setup.producer.enqueue_many(
                [
                    JobRequest("item", {"n": tiers[tier] + n}, key=f"{tier}-{n}", priority=tier)
                    for n in range(BACKLOG // 3)
                ]
            )
        await setup.producer.enqueue(JobRequest("item", {"n": 40_000}, key="urgent", priority="critical"))
        async with setup.working(concurrency=1):
            await until(lambda: len(ran) > BACKLOG, 60, "the backlog is done")

    naive_place, place = naive.index("urgent") + 1, ran.index(40_000) + 1
    assert naive_place == BACKLOG + 1, "the naive twin runs its most urgent job last"
    assert place == 1
    expected = [40_000] + [tiers[tier] + n for tier in ("high", "normal", "low") for n in range(BACKLOG // 3)]
    assert ran == expected, "tiers in order, first in first out within each"
    figures(
        "priority",
        name="backlog",
        backlog=BACKLOG,
        naive_urgent_ran_as_number=naive_place,
        critical_ran_as_number=place,
    )

"""Retention: Redis stays bounded, results that matter are answered from the database."""

import time

import pytest
from sqlalchemy import func, select, update

from harness.pipelines import JobSetup
from harness.waiting import until
from harness.workers import at_work, queue_at
from studyhall.patterns import checkpoint, dead_letter, idempotency, retention
from studyhall.patterns.core.errors import Transient
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.dead_letter import dead_letters
from studyhall.patterns.idempotency import Inbox, fingerprint
from studyhall.patterns.producer import KEPT, JobRequest
from studyhall.patterns.retention import Retention
from studyhall.patterns.typed_jobs import JobTypes, Payload


class Sum(Payload):
    n: int


def sums(*, fail=False):
    async def handler(ctx, payload: Sum):
        if fail:
            raise Transient("the provider answered 503 for a request that is described at some length here")
        return {"square": payload.n**2}

    jobs = JobTypes()
    jobs.register(name="sum", payload=Sum, handler=handler, queue="sums", retry=RetryPolicy(0.001, 0.001, 3))
    return jobs


def request(n):
    return JobRequest("sum", {"n": n}, key=f"k{n}")


def test_a_producer_keeps_jobs_by_the_same_rule_where_nothing_is_said():
    assert retention.DEFAULT.job_options() == KEPT


@pytest.mark.slow
async def test_failed_jobs_cost_redis_nothing_lasting_where_the_default_keeps_them_forever(
    make_redis, tmp_path, scale, figures
):
    server, number = make_redis(), scale(300, 2_000)

    def kept_bytes(queue):
        """The memory of the queue's keys, by the server's own count; its total includes every connection.
        Without the event stream, which BullMQ bounds at 10,000 entries whatever happens."""
        with server.client() as client:
            keys = [key for key in client.scan_iter(f"bull:{queue}:*") if not key.endswith(":events")]
            return sum(int(client.memory_usage(key, samples=0) or 0) for key in keys)

    async def naive(job, _token):
        raise RuntimeError("the provider answered 503 for a request that is described at some length here")

    async with queue_at(server.url, "naive") as queue:
        async with at_work("naive", naive, url=server.url):
            for n in range(number):
                await queue.add("sum", {"n": n}, {"attempts": 3, "backoff": 1})
            await until(lambda: _failed(queue, number), 120, "the naive jobs failed", every=0.2)
        kept = (await queue.getJobCounts("failed"))["failed"]
    naive_bytes = kept_bytes("naive") / number

    async with JobSetup.open(server.url, tmp_path, sums(fail=True)) as setup:
        async with setup.working():
            await setup.producer.enqueue_many([request(n) for n in range(number)])
            await until(lambda: _failed(setup.producer.queue("sums"), number), 120, "ours failed", every=0.2)
        await dead_letter.sweep(["sums"], setup.producer.redis, setup.store)
        left = [key async for key in setup.producer.redis.scan_iter("bull:sums:sum.*")]
        letters = await dead_letter.list_dead_letters(setup.store, limit=number + 10)
    ours = kept_bytes("sums") / number
    assert kept == number, "the naive twin keeps every failed job"
    assert naive_bytes > 1_000
    assert left == []
    assert len(letters) == number, "and none is forgotten: all are dead letters"
    assert ours < naive_bytes / 100
    figures(
        "retention",
        name="failed-jobs",
        failed=number,
        naive_redis_bytes_per_failed_job=round(naive_bytes),
        redis_bytes_per_failed_job=round(ours, 1),
        dead_letters=len(letters),
    )


async def _failed(queue, number):
    return bool((await queue.getJobCounts("failed"))["failed"] >= number)


async def test_results_that_left_redis_are_answered_from_the_database(redis_url, tmp_path, figures):
    number, keep = 200, 20
    async with (
        JobSetup.open(redis_url, tmp_path, sums(), retention=Retention(completed_count=keep).job_options()) as setup,
        setup.working(),
    ):
        await setup.producer.enqueue_many([request(n) for n in range(number)])
        await until(lambda: _answered(setup, number), 60, "all are done", every=0.1)
        in_redis = [await setup.job(request(n)) for n in range(number)]
        inbox = Inbox(setup.store, "sum")
        stored = [await inbox.seen(f"k{n}", fingerprint({"n": n})) for n in range(number)]
        counts = await setup.counts("sums")
    evicted = sum(job is None for job in in_redis)
    assert evicted == number - keep, "a waiter that asks Redis finds nothing: the naive answer is lost"
    assert counts["completed"] == keep
    assert [row.result for row in stored if row] == [{"square": n**2} for n in range(number)]
    figures("retention", name="evicted-results", jobs=number, evicted=evicted, answered_from_database=len(stored))


async def _answered(setup, number):
    async with read(setup.store) as connection:
        done = await connection.scalar(select(func.count()).select_from(idempotency.inbox))
    return done == number and not await setup.producer.redis.llen("bull:sums:active")


def test_markers_must_outlive_whatever_can_come_back():
    with pytest.raises(ValueError, match="markers_age must be at least"):
        Retention(markers_age=20 * retention.DAY)
    with pytest.raises(ValueError, match="checkpoints_age"):
        Retention(letters_age=50 * retention.DAY, markers_age=90 * retention.DAY)
    with pytest.raises(ValueError, match="at least one"):
        Retention(completed_count=0)
    assert retention.DEFAULT.markers_age >= retention.DEFAULT.failed_age + retention.DEFAULT.letters_age


async def test_purge_forgets_each_thing_after_its_own_time(store):
    now, day = time.time(), retention.DAY
    rules = Retention()
    for age_in_days in (1, 31, 61):
        async with begin(store) as tx:
            await checkpoint.save(tx, f"c{age_in_days}", 1, 1)
            await tx.execute(
                idempotency.inbox.insert().values(
                    consumer=f"consumer-{age_in_days % 2}",
                    key=f"k{age_in_days}",
                    fingerprint="f",
                    result="1",
                    at=now - age_in_days * day,
                )
            )
            await tx.execute(
                dead_letters.insert().values(
                    id=f"l{age_in_days}",
                    queue="q",
                    job_id="j",
                    name="n",
                    cause="exhausted",
                    reason="r",
                    attempts_made=1,
                    failed_at=now,
                    archived_at=now - age_in_days * day,
                    snapshot="{}",
                )
            )
            await tx.execute(
                update(checkpoint.checkpoints)
                .where(checkpoint.checkpoints.c.key == f"c{age_in_days}")
                .values(saved_at=now - age_in_days * day)
            )
    gone = [
        await idempotency.purge(store, rules.markers_age),
        await dead_letter.purge(store, rules.letters_age),
        await checkpoint.purge(store, rules.checkpoints_age),
    ]
    assert gone == [1, 2, 1]
    assert await idempotency.purge(store, rules.markers_age) == 0
    assert rules.markers_age == 60 * day

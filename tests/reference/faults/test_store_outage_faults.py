"""The database goes away under load: no job fails, none consumes an attempt, and it is not hammered."""

import asyncio
from collections import Counter

import pytest
from sqlalchemy import Column, Integer, Table, Text, event, select

from harness.pipelines import JobSetup
from harness.waiting import until
from studyhall.patterns import store_gate
from studyhall.patterns.core import store as store_module
from studyhall.patterns.core.errors import Cancelled
from studyhall.patterns.core.job import Deadline, RetryPolicy, cancelled
from studyhall.patterns.core.store import metadata, read
from studyhall.patterns.pipeline import Done
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

pytestmark = pytest.mark.fault
JOBS = 300
SLOTS = 20
PROBES = 3  # tries by single jobs during the outage, further and further apart

orders = Table(
    "outage_orders", metadata, Column("id", Integer, primary_key=True), Column("n", Integer), Column("text", Text)
)


class Work(Payload):
    n: int


def request(n):
    return JobRequest("work", {"n": n}, key=f"k{n}")


def jobs_for(handler):
    jobs = JobTypes()
    retry = RetryPolicy(base=0.05, cap=0.2, attempts=3)
    jobs.register(name="work", payload=Work, handler=handler, queue="setup", retry=retry, deadline=Deadline(30.0))
    return jobs


class Runs:
    """A handler that stores one row per job, larger than a page, and remembers its runs."""

    def __init__(self):
        self.of: Counter[int] = Counter()
        self.attempts: set[int] = set()

    async def handle(self, ctx, payload: Work):
        self.of[payload.n] += 1
        self.attempts.add(ctx.attempt)

        async def save(tx):
            await tx.execute(orders.insert().values(n=payload.n, text="x" * 9_000))

        return Done({"n": payload.n}, save)

    @property
    def total(self):
        return self.of.total()


class Disk:
    """Fills up for SQLite: no file may grow by another page, which is SQLITE_FULL without root or a mount."""

    def __init__(self, setup):
        self.full = False
        writer = store_module.hops[setup.store.sync_engine].writer
        for engine in (writer, setup.store.sync_engine):
            event.listen(engine, "checkout", self._limit)  # markers go past SQLAlchemy, not past its pool

    def _limit(self, database, *_):
        pages = "1" if self.full else "1073741823"  # SQLite raises the 1 to the size the file has
        cursor = database.cursor()
        cursor.execute(f"PRAGMA max_page_count={pages}")
        cursor.close()


async def stored(setup):
    async with read(setup.store) as connection:
        return sorted((await connection.scalars(select(orders.c.n))).all())


def count(setup, outcome):
    return sum(line["outcome"] == outcome for line in setup.lines)


async def everything_done_once(setup, runs):
    await until(lambda: _completed(setup, JOBS), 120, lambda: f"all done, now {setup.lines[-1:]}", every=0.1)
    assert await setup.counts("setup") == {"completed": JOBS}, "no job failed"
    assert await stored(setup) == list(range(JOBS)), "each took effect once"
    assert runs.attempts == {1}, "no attempt was consumed"
    outcomes = Counter(line["outcome"] for line in setup.lines)
    assert set(outcomes) <= {"snoozed", "completed"}, outcomes


async def _completed(setup, number):
    return (await setup.counts("setup")).get("completed", 0) == number


async def test_a_full_disk_fails_no_job_and_is_not_hammered(redis_url, tmp_path):
    runs = Runs()
    async with JobSetup.open(redis_url, tmp_path, jobs_for(runs.handle)) as setup:
        disk = Disk(setup)
        await setup.producer.enqueue_many([request(n) for n in range(JOBS)])
        disk.full = True
        async with setup.working(concurrency=SLOTS, lock=30):
            await until(lambda: count(setup, "snoozed") > PROBES, 60, "jobs met the full disk, some after a pause")
            assert (await setup.counts("setup")).get("failed", 0) == 0
            assert await stored(setup) == []
            tries = count(setup, "snoozed")
            assert tries <= 2 * SLOTS, f"{tries} executions met the outage, {JOBS} jobs waited"
            disk.full = False
            await everything_done_once(setup, runs)
        assert runs.total <= JOBS + 2 * SLOTS, "only work under way was repeated, not every job"


@pytest.mark.needs_postgres
async def test_postgres_stopped_and_started_again_fails_no_job(redis_url, own_postgres):
    runs = Runs()
    async with JobSetup.open(redis_url, own_postgres.url, jobs_for(runs.handle)) as setup:
        await setup.producer.enqueue_many([request(n) for n in range(JOBS)])
        async with setup.working(concurrency=SLOTS, lock=30):
            await until(lambda: count(setup, "completed") >= SLOTS, 60, "work is under way")
            await asyncio.to_thread(own_postgres.kill)
            before = count(setup, "snoozed")
            await until(lambda: count(setup, "snoozed") >= before + PROBES, 60, "jobs met the outage")
            await asyncio.to_thread(own_postgres.restart)
            await everything_done_once(setup, runs)
        assert count(setup, "snoozed") <= 3 * SLOTS, "the outage was met by what was under way, then by single jobs"


@pytest.mark.slow
async def test_naive_an_outage_that_counts_as_failure_empties_the_queue_into_the_failed_jobs(
    redis_url, tmp_path, monkeypatch
):
    for module in (store_module, store_gate):
        monkeypatch.setattr(module, "is_outage", lambda _error, **_options: False)
    async with JobSetup.open(redis_url, tmp_path, jobs_for(Runs().handle)) as setup:
        disk = Disk(setup)
        disk.full = True
        requests = [request(n) for n in range(50)]
        await setup.producer.enqueue_many(requests)
        async with setup.working(concurrency=SLOTS, lock=30):
            assert await setup.ended(*requests) == ["failed"] * 50


async def test_a_cancellation_during_an_outage_is_not_a_failure(redis_url, tmp_path):
    async def asked_to_stop(_ctx, _payload):
        raise Cancelled("the owner closed the account: " + "x" * 9_000)

    async with JobSetup.open(redis_url, tmp_path, jobs_for(asked_to_stop)) as setup:
        disk = Disk(setup)
        disk.full = True
        async with setup.working():
            ref = await setup.producer.enqueue(request(1))
            await until(lambda: setup.outcomes(ref.id), what="its end cannot be written")
            assert setup.outcomes(ref.id) == ["snoozed"]
            disk.full = False
            assert await setup.ended(request(1)) == ["completed"]
        assert cancelled((await setup.job(request(1))).returnvalue) is not None


async def test_a_job_older_than_its_retry_policy_survives_an_outage(redis_url, tmp_path):
    """`RetryPolicy.max_age` ends waiting that the job itself asks for, not an outage."""
    runs = Runs()
    jobs = JobTypes()
    retry = RetryPolicy(base=0.05, cap=0.2, attempts=1, max_age=0.001)
    jobs.register(name="work", payload=Work, handler=runs.handle, queue="setup", retry=retry, deadline=Deadline(30.0))
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        disk = Disk(setup)
        disk.full = True
        async with setup.working():
            ref = await setup.producer.enqueue(request(1))
            await until(lambda: setup.outcomes(ref.id), what="it met the outage")
            disk.full = False
            assert await setup.ended(request(1)) == ["completed"]
        assert setup.outcomes(ref.id)[0] == "snoozed"

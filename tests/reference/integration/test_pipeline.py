"""The composed pipeline on a real queue: every outcome, every kind of bad job, one line and one count each."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import Column, Integer, Table, func, select

from harness.pipelines import JobSetup
from harness.waiting import until
from studyhall.patterns import dead_letter, idempotency
from studyhall.patterns.core.errors import Cancelled, Permanent, RateLimited, ResourceBusy, Snooze, Transient
from studyhall.patterns.core.job import Deadline, RetryPolicy, cancelled
from studyhall.patterns.core.store import metadata, read
from studyhall.patterns.dead_letter.archive import dead_letters
from studyhall.patterns.pipeline import Done, JobContext
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.schedule import Schedules, ticking
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload

effects = Table("pipeline_effects", metadata, Column("id", Integer, primary_key=True), Column("n", Integer))
SECRET = "sk-live-4242424242424242"


class Work(Payload):
    n: int = 0
    email: str = "ann@example.com"


Handler = Callable[[JobContext, Work], Awaitable[Any]]


def jobs_for(handler, *, attempts=3, seconds=30.0):
    jobs = JobTypes()
    jobs.register(
        name="work",
        payload=Work,
        handler=handler,
        queue="setup",
        retry=RetryPolicy(base=0.05, cap=0.2, attempts=attempts),
        deadline=Deadline(seconds),
    )
    return jobs


def work(n=0, **options):
    return JobRequest("work", {"n": n}, key=options.pop("key", f"k{n}"), **options)


async def effect_count(setup):
    async with read(setup.store) as connection:
        return int(await connection.scalar(select(func.count()).select_from(effects)) or 0)


async def add_effect(ctx, payload: Work):
    async def save(tx):
        await tx.execute(effects.insert().values(n=payload.n))

    return Done({"n": payload.n, "attempt": ctx.attempt}, save)


class PanicException(BaseException):
    """What a panic of Rust code is in Python (pyo3)."""


class Wordless(Exception):
    def __str__(self):
        raise PanicException


def cancelled_future():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


def raise_(error):
    raise error


# -- outcomes ------------------------------------------------------------------------------------------------


async def test_completed_leaves_effect_result_line_and_count(redis_url, tmp_path):
    async with JobSetup.open(redis_url, tmp_path, jobs_for(add_effect)) as setup, setup.working():
        ref = await setup.producer.enqueue(work(1))
        assert await setup.ended(work(1)) == ["completed"]
        assert (await setup.job(work(1))).returnvalue == {"n": 1, "attempt": 1}
        assert await effect_count(setup) == 1
        await until(lambda: setup.lines, what="the line")
        [line] = setup.lines
        assert (line["job_id"], line["name"], line["queue"]) == (ref.id, "work", "setup")
        assert (line["attempt"], line["outcome"]) == (1, "completed")
        assert line["duration_ms"] >= 0
        assert line["correlation_id"]
        assert "ann@example.com" not in json.dumps(line), "the payload is not part of the line"
        assert 'jobs_total{name="work",outcome="completed",queue="setup"} 1.0' in setup.metrics.render().decode()


async def test_duplicate_gets_the_stored_result_without_a_second_effect(redis_url, tmp_path):
    async with JobSetup.open(redis_url, tmp_path, jobs_for(add_effect)) as setup, setup.working():
        await setup.producer.enqueue(work(1))
        await setup.ended(work(1))
        await (await setup.job(work(1))).remove()  # retention took it: the id is free again
        ref = await setup.producer.enqueue(work(1))
        await setup.ended(work(1))
        assert (await setup.job(work(1))).returnvalue == {"n": 1, "attempt": 1}
        assert await effect_count(setup) == 1
        assert setup.outcomes(ref.id) == ["completed", "duplicate"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: sys.exit(3), "Transient: the work raised SystemExit(3)"),
        (lambda: raise_(KeyboardInterrupt()), "Transient: the work raised KeyboardInterrupt"),
        (lambda: raise_(PanicException("out of bounds")), "PanicException: out of bounds"),
        (lambda: raise_(GeneratorExit()), "GeneratorExit: GeneratorExit"),
        (lambda: raise_(BaseExceptionGroup("two", [SystemExit(1), PanicException()])), "SystemExit: 1"),
        (lambda: raise_(Wordless()), "Wordless: Wordless"),
        (cancelled_future, "Transient: the handler let a CancelledError escape that nobody asked for"),
    ],
    ids=["sys.exit", "interrupt", "panic", "generator", "group", "wordless", "cancelled future"],
)
async def test_whatever_a_handler_raises_is_a_failed_attempt_and_the_line_says_so(redis_url, tmp_path, call, reason):
    """sys.exit() ended every worker that took the job; a panic ran forever, logged as completed."""

    async def handler(ctx, payload: Work):
        if payload.n == 0:
            call()

    requests = [work(n) for n in range(5)]
    async with JobSetup.open(redis_url, tmp_path, jobs_for(handler, attempts=2)) as setup, setup.working():
        refs = await setup.producer.enqueue_many(requests)
        assert await setup.ended(*requests) == ["failed"] + ["completed"] * 4
        assert setup.outcomes(refs[0].id) == ["retry", "exhausted"]
        assert reason in (await setup.job(work(0))).failedReason


@pytest.mark.slow
async def test_retries_come_with_jittered_delays_and_end_exhausted(redis_url, tmp_path):
    async def fails(ctx, payload: Work):
        raise Transient("provider down")

    requests = [work(n) for n in range(30)]
    async with JobSetup.open(redis_url, tmp_path, jobs_for(fails, attempts=2)) as setup:
        delays = []
        async with setup.working(concurrency=30) as [worker]:
            worker.on("delayed", lambda _job, error: delays.append(round(error.delay * 1000)))
            await setup.producer.enqueue_many(requests)
            assert await setup.ended(*requests) == ["failed"] * 30
        for request in requests:
            assert setup.outcomes(setup.producer.ref(request).id) == ["retry", "exhausted"]
            assert (await setup.job(request)).attemptsMade == 2
        assert len(delays) == 30
        assert max(delays) <= 50, "within base * 2**0"
        assert len(set(delays)) > 5, "spread over the range, not one delay for all"
        assert "attempt 2 of 2 failed" in (await setup.job(requests[0])).failedReason


@pytest.mark.parametrize(
    "wait",
    [RateLimited(retry_after=0.05), ResourceBusy(retry_after=0.05), Snooze(0.05)],
    ids=lambda error: type(error).__name__,
)
async def test_waiting_consumes_no_attempt(redis_url, tmp_path, wait):
    """More waits than there are attempts: each one would have been a failure in the naive count."""
    attempts = []

    async def waits(ctx, payload: Work):
        attempts.append(ctx.attempt)
        if len(attempts) < 4:
            raise wait

    async with JobSetup.open(redis_url, tmp_path, jobs_for(waits, attempts=2)) as setup, setup.working():
        ref = await setup.producer.enqueue(work())
        assert await setup.ended(work()) == ["completed"]
        assert attempts == [1, 1, 1, 1]
        assert setup.outcomes(ref.id) == ["snoozed"] * 3 + ["completed"]


async def test_permanent_fails_now_with_attempts_left(redis_url, tmp_path):
    async def never(ctx, payload: Work):
        raise Permanent(f"card declined for ann@example.com with {SECRET}")

    async with JobSetup.open(redis_url, tmp_path, jobs_for(never)) as setup, setup.working():
        ref = await setup.producer.enqueue(work())
        assert await setup.ended(work()) == ["failed"]
        assert setup.outcomes(ref.id) == ["permanent"]
        reason = (await setup.job(work())).failedReason
        assert "card declined" in reason
        for text in (reason, json.dumps(setup.lines)):
            assert SECRET not in text, "secrets are redacted in Redis and in the log"
            assert "ann@example.com" not in text


async def test_expired_work_is_dropped_visibly(redis_url, tmp_path):
    async with JobSetup.open(redis_url, tmp_path, jobs_for(add_effect)) as setup:
        ref = await setup.producer.enqueue(work(max_age=0.05))
        await asyncio.sleep(0.1)  # it gets too old without a worker
        async with setup.working():
            assert await setup.ended(work()) == ["failed"]
        assert "Expired" in (await setup.job(work())).failedReason
        assert await effect_count(setup) == 0
        assert setup.outcomes(ref.id) == ["expired"]


async def test_a_delayed_job_and_a_replayed_one_have_their_whole_max_age(redis_url, tmp_path):
    """Time before it was due, or while it lay dead, is not waiting time."""
    runs = []

    async def waits_once(ctx, payload: Work):
        runs.append(ctx.key)
        if runs.count(ctx.key) == 1 and ctx.key == "dies":
            raise Permanent("dies first")
        if runs.count(ctx.key) < 2 or (ctx.key == "dies" and runs.count(ctx.key) < 3):
            raise Snooze(0.1)
        return "done"

    jobs = JobTypes()
    jobs.register(name="work", payload=Work, handler=waits_once, queue="setup", retry=RetryPolicy(max_age=2.5))
    later, dies = JobRequest("work", {}, key="later", delay=3.0), JobRequest("work", {}, key="dies")
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        await setup.producer.enqueue(later)
        ref = await setup.producer.enqueue(dies)
        stamp = int((time.time() - 3600) * 1000)
        await setup.producer.redis.hset(f"bull:setup:{ref.id}", "timestamp", str(stamp))
        async with setup.working():
            assert await setup.ended(dies) == ["failed"]
            await dead_letter.sweep(["setup"], setup.producer.redis, setup.store)
            (letter,) = await dead_letter.find(setup.store, dead_letters.c.queue == "setup")
            await dead_letter.replay(setup.store, setup.producer.redis, letter.id)
            assert await setup.ended(later, dies) == ["completed", "completed"]


@pytest.mark.parametrize(("ahead", "ends"), [(-120, "failed"), (-30, "completed"), (3600, "completed")])
async def test_max_age_is_off_by_as_much_as_the_clocks_differ_and_no_more(redis_url, tmp_path, ahead, ends):
    """A producer whose clock is `ahead` seconds ahead of the worker's; the job is worth 60 s and starts at once."""
    async with JobSetup.open(redis_url, tmp_path, jobs_for(add_effect)) as setup:
        ref = await setup.producer.enqueue(work(max_age=60))
        stamp = int((time.time() + ahead) * 1000)
        await setup.producer.redis.hset(f"bull:setup:{ref.id}", "timestamp", str(stamp))
        async with setup.working():
            assert await setup.ended(work()) == [ends]


async def test_cancelled_by_the_handler_ends_without_effect_retry_or_dead_letter(redis_url, tmp_path):
    async def stops(ctx, payload: Work):
        raise Cancelled("the owner closed the account")

    async with JobSetup.open(redis_url, tmp_path, jobs_for(stops)) as setup, setup.working():
        ref = await setup.producer.enqueue(work())
        assert await setup.ended(work()) == ["completed"]
        assert cancelled((await setup.job(work())).returnvalue) is not None
        assert setup.outcomes(ref.id) == ["cancelled"]


async def test_released_on_drain_without_attempt_and_finished_by_the_next_worker(redis_url, tmp_path):
    begun = asyncio.Event()
    hold = [True]

    async def slow(ctx, payload: Work):
        begun.set()
        if hold.pop() if hold else False:
            await asyncio.sleep(60)
        return await add_effect(ctx, payload)

    async with JobSetup.open(redis_url, tmp_path, jobs_for(slow)) as setup:
        ref = await setup.producer.enqueue(work())
        async with setup.working():
            await begun.wait()
        assert setup.outcomes(ref.id) == ["released"]
        async with setup.working():
            assert await setup.ended(work()) == ["completed"]
        assert (await setup.job(work())).returnvalue == {"n": 0, "attempt": 1}, "no attempt was consumed"
        assert await effect_count(setup) == 1


@pytest.mark.parametrize("result", [object(), float("nan"), {1, 2}, b"bytes"], ids=["object", "nan", "set", "bytes"])
async def test_a_result_that_is_not_json_fails_once_and_takes_its_effect_back(redis_url, tmp_path, result):
    runs = []

    async def odd(ctx, payload: Work):
        runs.append(1)
        done = await add_effect(ctx, payload)
        return Done(result, done.save)

    async with JobSetup.open(redis_url, tmp_path, jobs_for(odd)) as setup, setup.working():
        await setup.producer.enqueue(work())
        assert await setup.ended(work()) == ["failed"]
        assert "NotJson" in (await setup.job(work())).failedReason
        assert (len(runs), await effect_count(setup)) == (1, 0)


# -- jobs that must not run ----------------------------------------------------------------------------------


async def test_bad_jobs_fail_at_once_and_their_neighbours_go_on(redis_url, tmp_path, figures):
    ran = []

    async def count(ctx, payload: Work):
        ran.append(payload.n)

    async with JobSetup.open(redis_url, tmp_path, jobs_for(count)) as setup:
        queue, good = setup.producer.queue("setup"), setup.producer

        def signed(name, ident, data, signer=None):
            return (signer or setup.signer).sign(name, ident, data)

        def data(n, **change):
            return {"v": 1, "payload": {"n": n, "email": "x"}, "key": f"bad{n}", "meta": {}, **change}

        def tick(schedule, n, **when):
            return signed("work", f"repeat:{schedule}", data(n, schedule={"id": schedule, **when}))

        stolen = signed("work", "work.somebody", data(906))
        bad = {
            "UnknownJob": ("wrok", signed("wrok", "bad.0", data(900))),
            "UnknownVersion": ("work", signed("work", "bad.1", data(901, v=7))),
            "MalformedPayload": ("work", signed("work", "bad.2", data(902, payload={"n": "many"}))),
            "MalformedPayload: no envelope": ("work", signed("work", "bad.3", {"n": 903})),
            "ForgedJob: unsigned": ("work", data(904)),
            "ForgedJob: altered": ("work", {**signed("work", "bad.5", data(1)), "payload": {"n": 905}}),
            "ForgedJob: of another job": ("work", stolen),
            "ForgedJob: other key": ("work", signed("work", "bad.7", data(907), Signer(["mallory's own key!"]))),
            "PayloadTooLarge": ("work", signed("work", "bad.8", data(908, payload={"n": 1, "email": "x" * 70_000}))),
            "ForgedJob: a list": ("work", [1, 2, 3]),
            "InvalidSchedule: cron": ("work", tick("bad-cron", 912, cron="61 * * * *")),
            "InvalidSchedule: time zone": ("work", tick("bad-zone", 913, cron="0 3 * * *", tz="Mars/Olympus")),
        }
        options = {10: {"jobId": "repeat:bad-cron:60000"}, 11: {"jobId": "repeat:bad-zone:60000"}}
        neighbours = [work(n) for n in range(10)]
        await good.enqueue_many(neighbours[:5])
        for number, (name, content) in enumerate(bad.values()):
            usual = {"jobId": f"bad.{number}", "attempts": 5, "priority": 1}
            await queue.add(name, content, usual | options.get(number, {}))
        await good.enqueue_many(neighbours[5:])
        async with setup.working(steps=[ticking(Schedules(setup.jobs, []), setup.store)]):
            await until(lambda: _finished(setup, len(bad) + 10), 30, "all of them ended")
        assert sorted(ran) == list(range(10)), "every neighbour ran, no bad job did"
        for number, why in enumerate(bad):
            job = await queue.getJob(options.get(number, {}).get("jobId", f"bad.{number}"))
            assert job.failedReason.startswith(why.partition(":")[0]), (why, job.failedReason)
            assert job.attemptsMade == 1, f"{why}: what can never pass consumes no attempt"
        lines = [line for line in setup.lines if line["job_id"].startswith(("bad.", "repeat:"))]
        assert len(lines) == len(bad), "one line each"
        assert {line["outcome"] for line in lines} == {"permanent"}
    figures(
        "pipeline",
        name="bad-jobs",
        bad_jobs=len(bad),
        handlers_run=len(ran) - len(neighbours),
        failed_at_once=len(lines),
        neighbours=len(neighbours),
    )


async def _finished(setup, number):
    counts = await setup.counts("setup")
    return counts.get("completed", 0) + counts.get("failed", 0) == number


# -- steps of one's own -------------------------------------------------------------------------------------


async def test_own_steps_run_in_order_before_the_work_and_only_for_valid_jobs(redis_url, tmp_path):
    seen = []

    async def first(run, call_next):
        seen.append(f"first {run.payload.n}")
        return await call_next(run)

    async def second(run, call_next):
        seen.append(f"second {run.payload.n}")
        if run.payload.n == 2:
            raise Permanent("not this one")
        return await call_next(run)

    async def handler(ctx, payload: Work):
        seen.append(f"work {payload.n}")

    async with JobSetup.open(redis_url, tmp_path, jobs_for(handler)) as setup:
        async with setup.working(concurrency=1, steps=[first, second]):
            await setup.producer.enqueue(work(1))
            await setup.producer.enqueue(work(2))
            await setup.producer.queue("setup").add("work", {"forged": True}, {"jobId": "forged.1"})
            assert await setup.ended(work(1), work(2)) == ["completed", "failed"]
            await until(lambda: _finished(setup, 3), 20, "the forged one ended")
        assert seen == ["first 1", "second 1", "work 1", "first 2", "second 2"]


async def test_what_a_step_holds_is_released_however_the_work_ends(redis_url, tmp_path):
    held = []

    async def holding(run, call_next):
        held.append(f"+{run.attempt}")
        try:
            return await call_next(run)
        finally:
            held.append(f"-{run.attempt}")

    async def fails_once(ctx, payload: Work):
        if ctx.attempt == 1:
            raise Transient("again")

    async with JobSetup.open(redis_url, tmp_path, jobs_for(fails_once)) as setup, setup.working(steps=[holding]):
        await setup.producer.enqueue(work())
        await setup.ended(work())
        assert held == ["+1", "-1", "+2", "-2"]


# -- what a crash between the steps leaves -------------------------------------------------------------------


async def test_a_job_whose_acknowledgement_was_lost_is_a_duplicate_when_it_comes_back(redis_url, tmp_path):
    """The effect was committed and the worker died before it could tell the queue."""
    async with JobSetup.open(redis_url, tmp_path, jobs_for(add_effect)) as setup:
        ref = await setup.producer.enqueue(work(1))
        job = await setup.job(work(1))
        box = idempotency.Inbox(setup.store, "work")
        await box.record("k1", idempotency.fingerprint(job.data["payload"]), {"n": 1, "from": "the dead worker"})
        async with setup.working():
            assert await setup.ended(work(1)) == ["completed"]
        assert (await setup.job(work(1))).returnvalue["from"] == "the dead worker"
        assert setup.outcomes(ref.id) == ["duplicate"]
        assert await effect_count(setup) == 0

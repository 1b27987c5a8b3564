"""Dead letters with a real Redis, real BullMQ workers and both databases."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from bullmq import FlowProducer, Job, Queue
from bullmq.custom_errors import UnrecoverableError
from sqlalchemy import func, select, update

from harness.waiting import until
from harness.workers import at_work
from studyhall.patterns import dead_letter
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import FailPermanently, ForgedJob
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.dead_letter import dead_letters, sweeper
from studyhall.patterns.retry import decide

Process = Callable[[Job, str], Awaitable[Any]]


@pytest_asyncio.fixture
async def redis(redis_url):
    client = producer_client(redis_url)
    yield client
    await client.aclose()


@asynccontextmanager
async def working(redis_url, process, *queues):
    async with AsyncExitStack() as stack:
        for queue in queues:
            await stack.enter_async_context(at_work(queue, process, url=redis_url))
        yield


async def dies(_job, _token):
    raise RuntimeError("provider says no")


async def add(redis, job_id, queue="q", **opts):
    data = {"v": 1, "key": job_id, "payload": {"text": "ü"}, "meta": {"cid": "c-42", "trace": "t-1"}}
    await Queue(queue, {"connection": redis}).add("greet", data, {"jobId": job_id, "attempts": 1, **opts})


async def fail(redis, redis_url, *job_ids, queue="q", process=dies):
    """Have a real worker fail these jobs."""
    for job_id in job_ids:
        await add(redis, job_id, queue)
    async with working(redis_url, process, queue):
        await until(lambda: failed(redis, len(job_ids), queue), 20, "the jobs fail")


async def failed(redis, number, queue="q"):
    return bool(await redis.zcard(f"bull:{queue}:failed") == number)


async def count(store):
    async with read(store) as connection:
        return (await connection.execute(select(func.count()).select_from(dead_letters))).scalar_one()


async def only(store):
    letters = await dead_letter.list_dead_letters(store)
    assert len(letters) == 1
    return letters[0]


async def test_the_five_causes_are_all_archived_and_leave_redis(store, redis, redis_url):
    async def process(job, _token):
        if job.id == "unrecoverable":
            raise UnrecoverableError("bad card")
        if job.id == "forged":
            reason = decide(ForgedJob("the job is not signed"), None, 0).reason
            raise FailPermanently(reason)
        raise RuntimeError("again")

    for job_id, attempts in (("exhausted", 2), ("unrecoverable", 5), ("stalled-out", 5), ("forged", 1)):
        await add(redis, job_id, attempts=attempts)
    await redis.hset("bull:q:stalled-out", "defa", "job stalled more than allowable limit")
    async with working(redis_url, process, "q"):
        await until(lambda: failed(redis, 4), 20, "four jobs fail")
    await redis.zadd("bull:q:failed", {"no-hash": 1_700_000_000_000, "broken": 1_700_000_000_001})
    await redis.hset("bull:q:broken", mapping={"name": "x", "data": "{oops", "opts": "{}"})

    swept = await dead_letter.sweep(["q"], redis, store)

    assert swept.archived == 6
    letters = {letter.job_id: letter for letter in await dead_letter.list_dead_letters(store)}
    assert {job_id: letter.cause for job_id, letter in letters.items()} == {
        "exhausted": "exhausted",
        "unrecoverable": "unrecoverable",
        "stalled-out": "stalled",
        "no-hash": "malformed",
        "broken": "malformed",
        "forged": "forged",
    }
    assert letters["unrecoverable"].reason == "bad card"
    assert letters["exhausted"].attempts_made == 2
    assert letters["exhausted"].correlation_id == "c-42"
    assert letters["exhausted"].data["payload"] == {"text": "ü"}
    assert letters["broken"].data is None
    left = [key async for key in redis.scan_iter("bull:q:*")]
    assert not [key for key in left if any(job_id in key for job_id in letters)], left
    assert await dead_letter.sweep(["q"], redis, store) == dead_letter.Swept()


async def test_a_page_is_the_most_that_is_ever_asked_of_redis_at_once(store, redis, monkeypatch):
    monkeypatch.setattr(sweeper, "PAGE", 10)
    monkeypatch.setattr(sweeper, "MOST_PER_SWEEP", 30)
    await redis.zadd("bull:q:failed", {f"j{n}": 1_700_000_000_000 + n for n in range(45)})
    assert (await dead_letter.sweep(["q"], redis, store)).archived == 30
    assert (await dead_letter.sweep(["q"], redis, store)).archived == 15


async def test_a_job_that_was_retried_after_the_archive_is_not_removed_from_the_queue(
    store, redis, redis_url, monkeypatch
):
    """Somebody retries the job between archive and removal: it must stay in the queue."""
    await fail(redis, redis_url, "j")
    retried = asyncio.Event()
    plain_eval = redis.eval

    async def eval_after_a_retry(script, *args):
        if script == sweeper._REMOVE:
            job = await Job.fromId(Queue("q", {"connection": redis}), "j")
            assert job is not None
            await job.retry()
            retried.set()
        return await plain_eval(script, *args)

    monkeypatch.setattr(redis, "eval", eval_after_a_retry)
    await dead_letter.sweep(["q"], redis, store)
    assert retried.is_set()
    assert await redis.lrange("bull:q:wait", 0, -1) == ["j"]
    assert await redis.hget("bull:q:j", "data")
    with pytest.raises(dead_letter.NotDeadLetter, match="in the queue"):
        await dead_letter.replay(store, redis, (await only(store)).id)


async def test_a_forged_id_does_not_take_the_queues_own_keys_along(store, redis):
    await add(redis, "j")
    await redis.zadd("bull:q:failed", {"meta": 1_700_000_000_000, "wait": 1_700_000_000_000})
    assert (await dead_letter.sweep(["q"], redis, store)).archived == 2
    assert await redis.exists("bull:q:meta")
    assert await redis.lrange("bull:q:wait", 0, -1) == ["j"]


async def test_broken_entries_do_not_stop_the_sweep_of_the_others(store, redis):
    broken = {
        "nul-\0-id": {"name": "a\0b", "data": "{}", "opts": "{}", "failedReason": "x\0y"},
        "odd-numbers": {"name": "x", "data": "{}", "opts": '{"attempts": "many"}', "atm": "some"},
        "odd-options": {"name": "x", "data": "[]", "opts": "[1]"},
    }
    for job_id, fields in broken.items():
        await redis.hset(f"bull:q:{job_id}", mapping=fields)
        await redis.zadd("bull:q:failed", {job_id: 1_700_000_000_000})
    await redis.set("bull:q:a-string", "no job")
    await redis.zadd("bull:q:failed", {"a-string": float("inf"), "good": 1_700_000_000_001.5})
    assert (await dead_letter.sweep(["q"], redis, store)).archived == 5
    assert await failed(redis, 0)
    assert (await dead_letter.sweep(["q"], redis, store)).archived == 0


async def test_ids_and_fields_that_are_not_utf8_do_not_block_the_sweep(store, redis, redis_url):
    """A whole page of them, the oldest, from a foreign producer that writes raw bytes."""
    await fail(redis, redis_url, "readable")
    for number in range(sweeper.PAGE):
        job_id = b"\xff\xfe\x00%d" % number
        fields = {
            b"name": b"caf\xe9",
            b"data": b'{"who":"\xed\xa0\x80"}',
            b"opts": b"{}",
            b"atm": 2**70,
            b"failedReason": b"b\xe4d \x00",
            b"\xff": b"\xff",
        }
        await redis.hset(b"bull:q:" + job_id, mapping=fields)
        await redis.zadd("bull:q:failed", {job_id: number})
    assert (await dead_letter.sweep(["q"], redis, store)).archived == sweeper.PAGE + 1
    assert await failed(redis, 0)
    assert [key async for key in redis.scan_iter("bull:q:*readable*")] == [], "what is archived leaves Redis"
    letters = await dead_letter.list_dead_letters(store, limit=200)
    by_id = {letter.job_id: letter for letter in letters}
    assert "readable" in by_id
    odd = by_id["\\xff\\xfe?7"]
    assert (odd.name, odd.reason) == ("caf\\xe9", "b\\xe4d \ufffd")
    assert len(by_id) == sweeper.PAGE + 1
    await dead_letter.replay(store, redis, odd.id)  # under its readable id


async def test_a_failed_alert_comes_again_with_the_same_id_and_disturbs_nobody(store, redis, redis_url):
    await fail(redis, redis_url, "a", "b")
    tried = []
    cured = False

    async def pager_down_for_a(letter):
        tried.append((letter.job_id, letter.id))
        if letter.job_id == "a" and not cured:
            raise ConnectionError("pager is down")

    swept = await dead_letter.sweep(["q"], redis, store, pager_down_for_a)
    assert (swept.alerted, swept.alerts_failed) == (1, 1)
    assert (await dead_letter.sweep(["q"], redis, store, pager_down_for_a)).alerted == 0, "lease not over yet"
    cured = True
    async with begin(store) as tx:
        await tx.execute(update(dead_letters).values(alerting_until=time.time() - 1))
    assert (await dead_letter.sweep(["q"], redis, store, pager_down_for_a)).alerted == 1
    ids = {job_id: {i for j, i in tried if j == job_id} for job_id in ("a", "b")}
    assert len(ids["a"]) == len(ids["b"]) == 1
    assert len(tried) == 3


async def test_a_hanging_pager_does_not_hold_up_the_sweep(store, redis, monkeypatch):
    monkeypatch.setattr(sweeper, "ALERT_SECONDS", 0.2)
    await redis.zadd("bull:q:failed", {f"j{n}": 1_700_000_000_000 for n in range(90)})

    async def hangs(_letter):
        await asyncio.Event().wait()

    swept = await asyncio.wait_for(dead_letter.sweep(["q"], redis, store, hangs), 10)
    assert (swept.archived, swept.alerted) == (90, 0)
    assert swept.alerts_failed == sweeper.ALERTS_AT_ONCE


async def test_switching_alerts_on_does_not_send_old_ones(store, redis):
    await redis.zadd("bull:q:failed", {"old": 1_600_000_000_000})
    await dead_letter.sweep(["q"], redis, store)
    async with begin(store) as tx:
        await tx.execute(update(dead_letters).values(archived_at=time.time() - 2 * sweeper.ALERT_WINDOW))
    sent = []

    async def alert(letter):
        sent.append(letter)

    await dead_letter.sweep(["q"], redis, store, alert)
    assert sent == []


async def test_a_replay_runs_under_the_same_id_with_its_trace_and_fresh_attempts(store, redis, redis_url):
    await fail(redis, redis_url, "j")
    before = time.time() * 1000
    await dead_letter.sweep(["q"], redis, store)
    letter = await only(store)
    await dead_letter.replay(store, redis, letter.id)
    ran = []

    async def works(job, _token):
        ran.append((job, job.attemptsMade, job.attemptsStarted))
        return "ok"

    async with working(redis_url, works, "q"):
        await until(lambda: bool(ran), 20, "the replayed job runs")
    job, attempts_made, starts = ran[0]
    assert job.id == "j"
    assert job.data == letter.data
    assert job.data["meta"] == {"cid": "c-42", "trace": "t-1"}
    assert attempts_made == 0
    assert starts == 2, "a second start: the job looks for its checkpoint"
    assert job.timestamp >= before - 5_000, "the time it lay dead is not its age"
    assert await dead_letter.list_dead_letters(store) == []
    assert [row.id for row in await dead_letter.list_dead_letters(store, replayed=True)] == [letter.id]


async def test_a_replay_that_dies_again_has_a_new_letter_and_the_whole_history(store, redis, redis_url):
    await fail(redis, redis_url, "j")
    await dead_letter.sweep(["q"], redis, store)
    first = await only(store)
    await dead_letter.replay(store, redis, first.id)
    async with working(redis_url, dies, "q"):
        await until(lambda: failed(redis, 1), 20, "it dies again")
    await dead_letter.sweep(["q"], redis, store)
    second = await only(store)
    assert second.replay_of == first.id
    assert [letter.id for letter in await dead_letter.show(store, second.id)] == [second.id, first.id]
    with pytest.raises(dead_letter.AlreadyReplayed, match="a newer one"):
        await dead_letter.replay(store, redis, first.id)


async def test_replay_refuses_what_cannot_be_replayed_with_a_named_error(store, redis, redis_url):
    with pytest.raises(dead_letter.UnknownDeadLetter, match="List them"):
        await dead_letter.replay(store, redis, "nonsense")
    await fail(redis, redis_url, "j")
    await dead_letter.sweep(["q"], redis, store)
    letter = await only(store)
    await add(redis, "j")  # the same request was enqueued again meanwhile
    with pytest.raises(dead_letter.NotDeadLetter, match="in the queue"):
        await dead_letter.replay(store, redis, letter.id)
    assert await redis.lrange("bull:q:wait", 0, -1) == ["j"]
    await Queue("q", {"connection": redis}).remove("j")
    await dead_letter.replay(store, redis, letter.id)  # the refusal did not use the letter up
    with pytest.raises(dead_letter.AlreadyReplayed):
        await dead_letter.replay(store, redis, letter.id)
    await redis.zadd("bull:q:failed", {"no-hash": 1_700_000_000_000})
    await dead_letter.sweep(["q"], redis, store)
    with pytest.raises(dead_letter.NothingToReplay, match="again"):
        await dead_letter.replay(store, redis, (await only(store)).id)


async def test_priority_and_paused_queues_are_respected_by_a_replay(store, redis):
    queue = Queue("q", {"connection": redis})
    for job_id, priority in (("low", 10), ("high", 2)):
        await add(redis, job_id, priority=priority)
        # Dead as BullMQ leaves it, without the wait for a worker.
        await redis.zrem("bull:q:prioritized", job_id)
        await redis.zadd("bull:q:failed", {job_id: 1_700_000_000_000})
    await dead_letter.sweep(["q"], redis, store)
    await queue.pause()
    assert len((await dead_letter.replay_many(store, redis, per_second=1000)).job_ids) == 2
    assert await redis.zrange("bull:q:prioritized", 0, -1) == ["high", "low"]
    assert await queue.isPaused()


async def test_replay_many_keeps_to_its_rate_and_reports_what_it_left_out(store, redis, redis_url):
    await fail(redis, redis_url, *(f"j{n}" for n in range(8)))
    await fail(redis, redis_url, "other", queue="q2")
    await dead_letter.sweep(["q", "q2"], redis, store)
    await add(redis, "j3")
    started = time.monotonic()
    done = await dead_letter.replay_many(store, redis, queue="q", per_second=20)
    assert time.monotonic() - started >= 7 / 20
    assert sorted(done.job_ids) == sorted(f"j{n}" for n in range(8) if n != 3)
    assert len(done.refused) == 1
    assert "in the queue" in next(iter(done.refused.values()))
    assert sorted(letter.job_id for letter in await dead_letter.list_dead_letters(store)) == ["j3", "other"]


async def test_a_full_redis_ends_a_replay_with_an_account_that_quotes_no_payload(store, redis, redis_url):
    await fail(redis, redis_url, "j0", "j1", "j2")
    await dead_letter.sweep(["q"], redis, store)
    ids = [letter.id for letter in await dead_letter.list_dead_letters(store)]
    await redis.config_set("maxmemory", 1)
    try:
        done = await dead_letter.replay_many(store, redis, ["nope", *ids])
    finally:
        await redis.config_set("maxmemory", 0)
    assert (done.job_ids, [*done.refused]) == ([], ["nope", *ids])
    assert "OutOfMemoryError" in done.refused[ids[0]]
    assert "ü" not in str(done.refused)
    assert "not tried" in done.refused[ids[1]]
    assert len((await dead_letter.replay_many(store, redis, ids)).job_ids) == 3


async def test_a_job_whose_key_is_taken_blocks_no_other_and_no_names_mean_no_replay(store, redis, redis_url):
    await fail(redis, redis_url, "j0", "j1")
    await dead_letter.sweep(["q"], redis, store)
    await redis.set("bull:q:j0", "odd")
    assert await dead_letter.replay_many(store, redis, []) == dead_letter.Replayed()
    done = await dead_letter.replay_many(store, redis)
    assert done.job_ids == ["j1"]
    assert "its key" in next(iter(done.refused.values()))


async def test_listing_pages_through_everything_once(store, redis):
    await redis.zadd("bull:q:failed", {f"j{n}": 1_700_000_000_000 + n for n in range(25)})
    await dead_letter.sweep(["q"], redis, store)
    async with begin(store) as tx:  # the worst case for a cursor: all archived in the same instant
        await tx.execute(update(dead_letters).values(archived_at=1_700_000_100.25))
    seen = []
    page = await dead_letter.list_dead_letters(store, limit=10)
    while page:
        seen += [letter.job_id for letter in page]
        page = await dead_letter.list_dead_letters(store, limit=10, after=page[-1].id)
    assert sorted(seen) == sorted(f"j{n}" for n in range(25))


async def test_the_payload_stays_out_of_the_letters_repr(store, redis, redis_url):
    await fail(redis, redis_url, "j")
    await dead_letter.sweep(["q"], redis, store)
    assert "payload" not in repr(await only(store))


async def test_replaying_a_dead_child_revives_its_flow(store, redis, redis_url):
    """two children → parent → grandparent. The bad one takes both along, its replay brings both back."""
    cured = False
    results = {}

    async def process(job, _token):
        if job.id == "bad" and not cured:
            raise RuntimeError("no")
        results[job.id] = await job.getChildrenValues() if job.name == "parent" else {}
        return f"result of {job.id}"

    def node(job_id, name, *children):
        opts = {"jobId": job_id, "attempts": 1, "failParentOnFailure": True}
        return {"name": name, "queueName": f"q-{name}", "data": {}, "opts": opts, "children": list(children)}

    family = node("top", "parent", node("mid", "parent", node("good", "child"), node("bad", "child")))
    del family["opts"]["failParentOnFailure"]
    await FlowProducer({"connection": redis}).add(family)
    queues = ["q-parent", "q-child"]
    async with working(redis_url, process, *queues):
        await until(lambda: failed(redis, 2, "q-parent"), 30, "both ancestors fail")
        await dead_letter.sweep(queues, redis, store)
        letters = {letter.job_id: letter for letter in await dead_letter.list_dead_letters(store)}
        assert sorted(letters) == ["bad", "mid", "top"]
        with pytest.raises(dead_letter.ChildrenFirst, match="bad"):
            await dead_letter.replay(store, redis, letters["mid"].id)
        cured = True
        await dead_letter.replay(store, redis, letters["bad"].id)
        await until(lambda: "top" in results, 30, "the flow completes")
    assert sorted(results["mid"].values()) == ["result of bad", "result of good"]
    assert list(results["top"].values()) == ["result of mid"]
    assert await dead_letter.list_dead_letters(store) == []


async def test_a_snapshot_is_what_redis_had(store, redis, redis_url):
    async def logs_then_dies(job, _token):
        await job.log("half way")
        raise RuntimeError("no")

    await fail(redis, redis_url, "j", process=logs_then_dies)
    fields = await redis.hgetall("bull:q:j")
    await dead_letter.sweep(["q"], redis, store)
    letter = await only(store)
    assert letter.snapshot["fields"] == fields
    assert letter.snapshot["logs"] == ["half way"]
    assert json.loads(fields["stacktrace"])

"""Jobs that others wrote into Redis: each ends in one visible state, whatever its fields hold."""

import asyncio
import json
from typing import Any

import pytest

from harness.pipelines import JobSetup
from harness.waiting import until
from harness.workers import at_work, queue_at
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

DEEP = "[" * 100_000 + "]" * 100_000


def options(**values):
    return {"opts": json.dumps({"attempts": 2, **values})}


# Fields that are set (None: deleted) on an otherwise good job with two attempts.
SHAPES: dict[str, dict[str, Any]] = {
    "removeOnFail text": options(removeOnFail="x"),
    "removeOnComplete text": options(removeOnComplete="x"),
    "removeOnComplete null": options(removeOnComplete=None),
    "removeOnFail list": options(removeOnFail=[]),
    "removeOnFail count text": options(removeOnFail={"count": "x"}, removeOnComplete={"count": "x"}),
    "removeOnFail age fraction": options(removeOnFail={"age": 3600.5}, removeOnComplete={"age": 3600.5}),
    "removeOnFail huge": options(removeOnFail=10**30, removeOnComplete=10**30),
    "stackTraceLimit text": options(stackTraceLimit="2"),
    "stackTraceLimit negative": options(stackTraceLimit=-1),
    "stackTraceLimit list": options(stackTraceLimit=[1]),
    "attempts text": options(attempts="x"),
    "attempts digits": options(attempts="3"),
    "attempts null": options(attempts=None),
    "attempts negative": options(attempts=-5),
    "attempts fraction": options(attempts=2.5),
    "attempts huge": options(attempts=10**30),
    "attempts list": options(attempts=[3]),
    "backoff text": options(backoff="soon"),
    "backoff fraction": options(backoff=1.5),
    "backoff empty": options(backoff={}),
    "backoff delay text": options(backoff={"type": "fixed", "delay": "x"}),
    "backoff no delay": options(backoff={"type": "exponential"}),
    "backoff jitter text": options(backoff={"type": "fixed", "delay": 1, "jitter": "x"}),
    "delay option text": options(delay="x"),
    "priority option text": options(priority="x"),
    "timestamp option text": options(timestamp="x"),
    "keepLogs text": options(keepLogs="x"),
    "lifo text": options(lifo="x"),
    "parent option text": options(parent="x"),
    "parent option list": options(parent=[1]),
    "deduplication text": options(deduplication="x", de="x"),
    "failure flags": options(fpof="x", cpof={}, idof=10**30),
    "failure flags together": options(fpof=True, cpof=True),
    "repeat text": {**options(repeat="x"), "rjk": "beat"},
    "opts list": {"opts": "[]"},
    "opts null": {"opts": "null"},
    "opts broken": {"opts": "{"},
    "opts missing": {"opts": None},
    "atm text": {"atm": "x"},
    "atm fraction": {"atm": "0.5"},
    "ats text": {"ats": "x"},
    "stc text": {"stc": "x"},
    "attemptsMade text": {"attemptsMade": "x"},
    "attemptsMade 0": {"attemptsMade": "0"},
    "stacktrace null": {"stacktrace": "null"},
    "stacktrace broken": {"stacktrace": "["},
    "stacktrace numbers": {"stacktrace": "[1, null]"},
    "progress broken": {"progress": "{"},
    "delay text": {"delay": "x"},
    "priority text": {"priority": "x"},
    "priority not a number": {"priority": "nan"},
    "timestamp missing": {"timestamp": None},
    "timestamp text": {"timestamp": "x"},
    "processedOn and finishedOn text": {"processedOn": "x", "finishedOn": "x"},
    "parent broken": {"parent": "{", "parentKey": "bull:q:none"},
    "parent empty": {"parent": "{}"},
    "parent number": {"parent": "5"},
    "parent id missing": {"parent": '{"queueKey": "bull:q"}', "parentKey": "bull:q:none"},
    "parentKey text": {"parentKey": "x"},
    "data null": {"data": "null"},
    "data broken": {"data": "{not json"},
    "data deep": {"data": DEEP},
    "data missing": {"data": None},
    "data list": {"data": "[1]"},
    "data not UTF-8": {"data": b'{"text": "\xff"}'},
    "name missing": {"name": None},
    "name not UTF-8": {"name": b"\xff"},
    "everything missing": dict.fromkeys(("name", "data", "opts", "timestamp", "delay", "priority")),
    "failedReason not UTF-8": {"failedReason": b"\xff"},
    "condemned": {"defa": "stalled elsewhere"},
}
LISTS = ("wait", "active", "paused")
STATES = (*LISTS, "delayed", "prioritized", "waiting-children", "completed", "failed")


def put(client, queue, job_id, good):
    fields = {**good, **SHAPES.get(job_id, {})}
    kept = {name: value for name, value in fields.items() if value is not None}
    if kept:
        client.hset(f"bull:{queue}:{job_id}", mapping=kept)
    client.lpush(f"bull:{queue}:wait", job_id)
    client.zadd(f"bull:{queue}:marker", {"0": 0})


def states(client, queue):
    """The states each job is in."""
    where = {}
    for state in STATES:
        key = f"bull:{queue}:{state}"
        members = client.lrange(key, 0, -1) if state in LISTS else client.zrange(key, 0, -1)
        for job_id in members:
            where.setdefault(job_id, []).append(state)
    return where


def all_ended(client, queue, ids):
    now = states(client, queue)
    return all(len(now.get(i, [])) == 1 and now[i][0] in ("completed", "failed") for i in ids)


def open_ones(client, queue, ids):
    now = states(client, queue)
    return str({i: now.get(i) for i in ids if now.get(i) not in (["completed"], ["failed"])})


@pytest.mark.parametrize("work", ["succeeds", "fails"])
async def test_a_foreign_job_ends_in_one_visible_state_and_its_neighbours_run(redis_url, redis_server, work):
    """Each of these looped as stalled, or ended in no state at all, or stopped the tools that list the failed."""
    runs = {}

    async def process(job, token):
        runs[job.id] = runs.get(job.id, 0) + 1
        await asyncio.sleep(0)
        if job.name != "neighbour" and work == "fails":
            raise ValueError("fails")
        return "done"

    neighbours = [f"neighbour {number}" for number in range(20)]
    ids = [*SHAPES, *neighbours]
    with redis_server.client() as client:
        good = {"name": "job", "data": "{}", "timestamp": "1700000000000", "delay": "0", "priority": "0"}
        good |= options()
        for number, shape in enumerate(SHAPES):
            put(client, "q", shape, good)
            if number < len(neighbours):
                put(client, "q", neighbours[number], {**good, "name": "neighbour"})
        async with (
            queue_at(redis_url, "q") as queue,
            at_work(
                "q",
                process,
                url=redis_url,
                concurrency=3,
                lock_duration=2,
                stalled_interval=0.5,
                on_error=lambda _: None,
            ),
        ):
            await until(lambda: all_ended(client, "q", ids), 40, lambda: open_ones(client, "q", ids))
            listed = [job.id for job in [*await queue.getCompleted(), *await queue.getFailed()]]
        now = states(client, "q")
    assert sorted(listed) == sorted(ids)
    assert {now[i][0] for i in neighbours} == {"completed"}
    assert all(runs[i] == 1 for i in neighbours)
    assert max(runs.values()) <= 3, "no job runs more often than its attempts"
    if work == "succeeds":
        failed = {i for i in SHAPES if now[i] == ["failed"]}
        assert failed == {
            *("opts list", "opts null", "opts broken", "failure flags together"),
            *("data broken", "data deep", "name missing", "everything missing", "condemned"),
        }


async def test_an_id_whose_key_is_not_a_hash_leaves_the_queue_and_its_neighbours_run(redis_url, redis_server):
    """It came back as stalled forever: no script can end what is not a job."""
    runs = []
    errors = []

    async def process(job, token):
        runs.append(job.id)

    with redis_server.client() as client:
        client.set("bull:q:text", "x")
        client.rpush("bull:q:list", "x")
        client.zadd("bull:q:ranked", {"x": 1})
        client.lpush("bull:q:wait", "text", "list")
        client.zadd("bull:q:prioritized", {"ranked": 1})
        async with (
            queue_at(redis_url, "q") as queue,
            at_work("q", process, url=redis_url, concurrency=1, on_error=lambda error: errors.append(str(error))),
        ):
            await queue.addBulk([{"name": "job", "data": {}} for _ in range(5)])
            # The second one waits for a foreign key that the end of the first job meets.
            client.lpush("bull:q:wait", "text")
            await queue.addBulk([{"name": "job", "data": {}} for _ in range(5)])
            await until(lambda: len(runs) == 10, 30, "the neighbours")
            await until(lambda: len(errors) == 4, 30, lambda: f"each to be named, not {errors}")
            assert client.llen("bull:q:active") == 0
            assert len(await queue.getCompleted()) == 10
        assert client.get("bull:q:text") == "x", "what is not a job is left alone"
    assert all("removed from the queue" in text for text in errors)


class Work(Payload):
    n: int = 0


async def test_a_foreign_job_ends_in_one_visible_state_in_the_pipeline_too(redis_url, redis_server, tmp_path):
    async def nothing(_ctx, _payload): ...

    jobs = JobTypes()
    jobs.register(name="work", payload=Work, handler=nothing, queue="q", retry=RetryPolicy(base=0.01, attempts=2))
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        ref = await setup.producer.enqueue(JobRequest("work", {}, key="good"))
        with redis_server.client() as client:
            good = client.hgetall(f"bull:q:{ref.id}")
            for shape in SHAPES:
                data = json.dumps({**json.loads(good["data"]), "key": shape})
                put(client, "q", shape, {**good, **options(), "data": data})
            ids = [ref.id, *SHAPES]
            async with setup.working(lock=2, signer=None):
                await until(lambda: all_ended(client, "q", ids), 40, lambda: open_ones(client, "q", ids))
            assert states(client, "q")[ref.id] == ["completed"]
            lines = {line["job_id"]: line["outcome"] for line in setup.lines}
        assert lines["attempts text"] == lines["atm text"] == "completed"
        assert lines["data null"] == "permanent"

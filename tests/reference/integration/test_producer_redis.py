"""The producer: bad input is refused by name before anything is queued, and one key is one job."""

import asyncio
import json
import math

import pytest
from redis.asyncio import Redis

from harness.pipelines import JobSetup
from harness.waiting import until
from harness.workers import at_work
from studyhall.patterns import flow
from studyhall.patterns.claim_check import PayloadTooLarge
from studyhall.patterns.core.errors import FailedTwin, FailPermanently, InvalidDelay, Permanent, Transient
from studyhall.patterns.core.job import RetryPolicy, correlation
from studyhall.patterns.flow import FlowConflict, FlowTooLarge, UnknownPolicy, chain, fan_in
from studyhall.patterns.job_ids import InvalidKey
from studyhall.patterns.priority import UnknownPriority
from studyhall.patterns.producer import JobRequest, KeyReused, Producer
from studyhall.patterns.typed_jobs import InvalidMaxAge, JobTypes, MalformedPayload, Payload, UnknownJob


class Note(Payload):
    text: str = "hello"


async def keep(ctx, payload: Note):
    if payload.text == "poison":
        raise Permanent("poison")


def note_jobs():
    jobs = JobTypes()
    jobs.register(name="note", payload=Note, handler=keep, queue="notes", retry=RetryPolicy(0.01, 0.01, 1))
    return jobs


def note(key="k", text="hello", **options):
    return JobRequest("note", {"text": text}, key=key, **options)


BAD: list[tuple[type[Exception], JobRequest]] = [
    (UnknownPriority, note(priority="urgent")),
    (UnknownPriority, note(priority=7)),
    (InvalidDelay, note(delay=-1)),
    (InvalidDelay, note(delay=math.nan)),
    (InvalidDelay, note(delay=math.inf)),
    (InvalidDelay, note(delay="soon")),
    (InvalidMaxAge, note(max_age=0)),
    (InvalidMaxAge, note(max_age=-3)),
    (InvalidMaxAge, note(max_age=math.inf)),
    (MalformedPayload, JobRequest("note", {"txt": "x"}, key="k")),
    (MalformedPayload, JobRequest("note", {"text": 5}, key="k")),
    (UnknownJob, JobRequest("nota", {"text": "x"}, key="k")),
    (InvalidKey, note(key="")),
    (InvalidKey, note(key=None)),
    (PayloadTooLarge, note(text="x" * 70_000)),
    (UnknownPolicy, fan_in(note("p"), [note("c", on_failure="shrug")])),
    (FlowConflict, fan_in(note("p"), [note("c"), note("c")])),
    (FlowConflict, chain(note("p"), note("c"), note("p"))),
    (FlowTooLarge, fan_in(note("p"), [note(f"c{n}") for n in range(1001)])),
    (FlowTooLarge, chain(*(note(f"c{n}") for n in range(101)))),
    (FlowTooLarge, chain(*(note(f"c{n}") for n in range(5000)))),
]


@pytest.mark.parametrize(("error", "request_"), BAD, ids=[f"{e.__name__}-{n}" for n, (e, _) in enumerate(BAD)])
async def test_bad_input_is_refused_by_name_and_nothing_is_queued(redis_url, tmp_path, error, request_):
    async with JobSetup.open(redis_url, tmp_path, note_jobs()) as setup:
        with pytest.raises(error) as refused:
            await setup.producer.enqueue(request_)
        assert isinstance(refused.value, Permanent)
        assert 20 < len(str(refused.value)) < 500, "says what to do, and does not repeat the input"
        assert await setup.counts("notes") == {}


async def test_one_key_is_one_job_from_many_producers_at_once(redis_url, tmp_path):
    async with JobSetup.open(redis_url, tmp_path, note_jobs()) as setup:
        refs = await asyncio.gather(*(setup.producer.enqueue(note("same")) for _ in range(50)))
        assert len({ref.id for ref in refs}) == 1
        assert await setup.counts("notes") == {"prioritized": 1}


async def test_a_repeat_of_a_failed_request_is_an_error_that_says_so(redis_url, tmp_path):
    """BullMQ ignores the add without a word: the caller would believe that the work is on its way."""
    async with JobSetup.open(redis_url, tmp_path, note_jobs()) as setup:
        async with setup.working():
            await setup.producer.enqueue(note("k", "poison"))
            assert await setup.ended(note("k")) == ["failed"]
        stock = await setup.producer.queue("notes").add("note", {}, {"jobId": setup.producer.ref(note("k")).id})
        assert stock is not None
        assert await setup.state(note("k")) == "failed", "BullMQ reported an add that never happened"
        with pytest.raises(FailedTwin, match="dead letters"):
            await setup.producer.enqueue(note("k", "poison"))
        with pytest.raises(FailedTwin, match="dead letters"):
            await setup.producer.enqueue_many([note("other"), note("k", "poison")])
        with pytest.raises(FailedTwin, match="dead letters"):
            await setup.producer.enqueue(fan_in(note("parent"), [note("k", "poison")]))


async def test_a_job_that_fails_at_once_is_not_taken_for_its_own_twin(redis_url, tmp_path, monkeypatch):
    async with JobSetup.open(redis_url, tmp_path, note_jobs()) as setup, setup.working():
        ask = flow._present

        async def ask_late(*args):
            assert await setup.ended(note("k")) == ["failed"], "the worker is faster than the question"
            return await ask(*args)

        monkeypatch.setattr(flow, "_present", ask_late)  # a plain add asks before it adds
        await setup.producer.enqueue(fan_in(note("parent"), [note("k", "poison")]))
        with pytest.raises(FailedTwin):
            await setup.producer.enqueue_many([note("k", "poison")])


async def test_a_server_that_forgot_the_scripts_is_taught_them_again(redis_url, tmp_path):
    async with JobSetup.open(redis_url, tmp_path, note_jobs()) as setup:
        for round_ in ("a", "b"):
            await setup.producer.redis.script_flush()
            await setup.producer.enqueue(note(f"{round_}-1", delay=60))
            await setup.producer.redis.script_flush()
            await setup.producer.enqueue_many([note(f"{round_}-{n}") for n in (2, 3)])
        assert await setup.counts("notes") == {"delayed": 2, "prioritized": 4}


async def test_options_of_every_job_are_explicit(redis_url, tmp_path):
    async with JobSetup.open(redis_url, tmp_path, note_jobs()) as setup:
        await setup.producer.enqueue(note("k", priority="low", delay=60, max_age=600))
        job = await setup.job(note("k"))
        assert job.opts["attempts"] == 1
        assert job.opts["priority"] == 10_000
        assert job.opts["delay"] == 60_000
        assert set(job.opts["removeOnComplete"]) == {"count", "age"}
        assert job.opts["removeOnFail"] == {"age": 14 * 24 * 3600}
        assert job.data["meta"]["max_age"] == 600
        assert job.data["sig"]


async def test_a_longer_timeout_waits_for_a_server_that_stands_still_for_longer_than_the_usual_answer(own_redis):
    """The client's own limit of 1.5 s cut every longer one short."""
    producer = Producer(own_redis.url, timeout=60)
    await producer.enqueue(JobRequest("mail", {}, key="before", queue="mails"))
    own_redis.pause()
    adding = asyncio.create_task(producer.enqueue(JobRequest("mail", {}, key="meanwhile", queue="mails")))
    await asyncio.sleep(2.5)  # the fault itself
    own_redis.resume()
    assert (await adding).id
    await producer.close()


async def test_jobs_of_an_earlier_producer_run_under_their_correlation_id_and_are_the_same_job(redis_url, tmp_path):
    async with JobSetup.open(redis_url, tmp_path, note_jobs()) as setup:
        for key, text in (("waits", "hello"), ("fails", "poison")):
            ref = setup.producer.ref(note(key))
            data = {"v": 1, "payload": {"text": text}, "key": key, "meta": {"cid": f"c-{key}", "at": 1_700_000_000_000}}
            options = {"jobId": ref.id, "priority": 1_000, "attempts": 1, "stackTraceLimit": 5}
            await setup.producer.queue("notes").add(ref.name, setup.signer.sign(ref.name, ref.id, data), options)
        await setup.producer.enqueue(note("waits"))
        with pytest.raises(KeyReused):
            await setup.producer.enqueue(note("waits", "another text"))
        async with setup.working():
            assert await setup.ended(note("waits"), note("fails")) == ["completed", "failed"]
        assert sorted(line["correlation_id"] for line in setup.lines) == ["c-fails", "c-waits"]
        with pytest.raises(FailedTwin):
            await setup.producer.enqueue(note("fails", "poison"))


async def test_without_a_correlation_id_the_jobs_own_id_serves_and_a_flow_shares_one(redis_url, tmp_path):
    started = set()

    async def fails_once(ctx, payload: Note):
        if ctx.job_id not in started:
            started.add(ctx.job_id)
            raise Transient("once")

    jobs, long = JobTypes(), note("k" * 80)
    jobs.register(name="note", payload=Note, handler=fails_once, queue="notes", retry=RetryPolicy(0.01, 0.01, 2))
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        await setup.producer.enqueue_many([note("alone"), note("other")])
        assert set((await setup.job(note("alone"))).data) == {"v", "payload", "key", "sig"}
        await setup.producer.enqueue(long)
        with correlation("request-7"):
            await setup.producer.enqueue(note("asked"))
        await setup.producer.enqueue(fan_in(note("parent"), [note("child")]))
        async with setup.working():
            await setup.ended(*map(note, ("alone", "other", "asked", "parent", "child")), long)
        seen = {(line["job_id"], line["correlation_id"]) for line in setup.lines}
        ids = dict(seen)
        assert (len(setup.lines), len(seen)) == (12, 6), "the same in both attempts"
        assert (ids["note.alone"], ids["note.other"], ids["note.asked"]) == ("note.alone", "note.other", "request-7")
        assert ids["note.parent"] == ids["note.child"]


async def test_a_failed_twin_is_reported_without_any_step_too(redis_url):
    async def refuse(job, token):
        raise FailPermanently("no")

    producer = Producer(redis_url, timeout=10)
    mail = JobRequest("mail", {"to": "ann"}, key="order-7", queue="mails")
    ref = await producer.enqueue(mail)
    async with at_work("mails", refuse, url=redis_url):
        await until(lambda: producer.redis.zscore("bull:mails:failed", ref.id), 30, "it has failed")
    with pytest.raises(FailedTwin):
        await producer.enqueue(mail)
    await producer.close()


async def test_connections_that_the_server_closed_cost_no_add(redis_url):
    producer = Producer(redis_url, timeout=10)
    for number in range(5):
        mails = [JobRequest("mail", {}, key=f"{number}-{n}", queue="mails") for n in range(8)]
        await asyncio.gather(*map(producer.enqueue, mails))
        async with Redis.from_url(redis_url) as other:
            await other.client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.05 * (number % 2))  # seen, or found out by writing
    assert await producer.queue("mails").getJobCounts("prioritized") == {"prioritized": 40}
    await producer.close()


async def test_an_add_leaves_in_the_server_what_bullmqs_own_leaves(redis_url, monkeypatch):
    """Keys, scores and events, for jobs that are new, there already, delayed, and delayed to the same moment."""
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    monkeypatch.setattr("studyhall.patterns.producer.AT_ONCE", 2)
    keys, left = ["a", "b", "a", "c"], []
    producer = Producer(redis_url)
    for meta in ({}, {"opts.maxLenEvents": 5}, {"paused": 1}, {"concurrency": 0}, {"concurrency": 3}):
        for ours in (True, False):
            queue = producer.queue(f"as-bullmq-{ours}-{len(left)}")
            if meta:
                await producer.redis.hset(queue.keys["meta"], mapping=meta)
            for delay in (0, 60, 30):
                jobs = [JobRequest(f"sum{delay}", {"n": 1}, key=key, delay=delay, queue=queue.name) for key in keys]
                if ours:
                    await producer.enqueue_many(jobs)
                    await producer.enqueue(jobs[0])
                    continue
                for each in [*jobs, jobs[0]]:
                    job = producer.outgoing(each)
                    await queue.add(each.name, job.data, {**job.opts, "jobId": job.ref.id})
            left.append(await stored(producer.redis, queue))
        assert left[-1] == left[-2]
        assert len(left[-1]) > 12
    await producer.close()


async def stored(redis, queue):
    """Every key of the queue; without the time of events, and what BullMQ's own class adds to the options."""
    found = {}
    async for key in redis.scan_iter(f"{queue.keys['']}*"):
        name, kind = key.removeprefix(queue.keys[""]), await redis.type(key)
        if kind == "hash":
            fields = found[name] = await redis.hgetall(key)
            if "opts" in fields:
                fields["opts"] = {"delay": 0, **json.loads(fields["opts"]), "jobId": ""}
        elif kind == "zset":
            found[name] = await redis.zrange(key, 0, -1, withscores=True)
        elif kind == "stream":
            found[name] = [fields for _, fields in await redis.xrange(key)]
        else:
            found[name] = await redis.get(key)
    return found

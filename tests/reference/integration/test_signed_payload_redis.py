"""Somebody who can write to Redis: our worker runs none of it, the usual worker runs all of it."""

import json

from harness.pipelines import KEYS, JobSetup
from harness.waiting import until
from harness.workers import at_work
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload

NEW_KEY = "the-second-signing-key-of-the-tests"


class Payout(Payload):
    to: str
    cents: int


def payout_jobs(paid):
    async def pay(ctx, payload: Payout):
        paid.append((payload.to, payload.cents))

    jobs = JobTypes()
    for name in ("payout", "refund"):
        jobs.register(name=name, payload=Payout, handler=pay, queue="payouts")
    return jobs


def payout(to, cents=100, name="payout"):
    return JobRequest(name, {"to": to, "cents": cents}, key=to)


async def tamper(setup, request, field, change):
    """What an intruder with a Redis shell does."""
    key = f"bull:payouts:{setup.producer.ref(request).id}"
    stored = await setup.producer.redis.hget(key, field)
    changed = change(json.loads(stored) if field == "data" else stored)
    await setup.producer.redis.hset(key, field, json.dumps(changed) if field == "data" else changed)


def richer(data):
    return {**data, "payload": {**data["payload"], "cents": 1_000_000}}


async def test_injected_and_altered_jobs_never_run_where_the_usual_worker_pays_them(redis_url, tmp_path, figures):
    paid = []
    async with JobSetup.open(redis_url, tmp_path, payout_jobs(paid)) as setup:
        redis, queue = setup.producer.redis, setup.producer.queue("payouts")

        async def attack():
            """Eight ways in, and three honest neighbours; returns the ids of the bad ones."""
            for name in ("ann", "bob", "cid", "altered", "renamed", "victim", "emptied"):
                await setup.producer.enqueue(payout(name))
            await tamper(setup, payout("altered"), "data", richer)
            await tamper(setup, payout("renamed"), "name", lambda _: "refund")
            donor = json.loads(await redis.hget("bull:payouts:payout.ann", "data"))
            await tamper(setup, payout("victim"), "data", lambda _: donor)  # swapped between jobs
            await tamper(setup, payout("emptied"), "data", lambda data: {**data, "sig": ""})
            envelope = {"v": 1, "payload": {"to": "mallory", "cents": 5}, "key": "m", "meta": {}}
            await queue.add("payout", envelope, {"jobId": "injected", "attempts": 3})
            # A genuine job under a new id.
            await queue.add("payout", donor, {"jobId": "copied", "attempts": 3})
            other = Signer(["a key of mallory's own making"]).sign("payout", "foreign", envelope)
            await queue.add("payout", other, {"jobId": "foreign", "attempts": 3})
            return [
                "payout.altered",
                "payout.renamed",
                "payout.victim",
                "payout.emptied",
                "injected",
                "copied",
                "foreign",
            ]

        naive = []

        async def usual_worker(job, _token):
            naive.append((job.data["payload"]["to"], job.data["payload"]["cents"]))

        bad = await attack()
        async with at_work("payouts", usual_worker, url=redis_url):
            await until(lambda: len(naive) == len(bad) + 3, 30, "the usual worker is through")
        assert ("mallory", 5) in naive, "the naive twin ran the injected job"
        assert ("altered", 1_000_000) in naive, "and the altered one"

        await queue.obliterate(True)
        bad = await attack()
        async with setup.working():
            await until(lambda: _through(setup, len(bad) + 3), 30, "ours is through")
        assert sorted(paid) == [("ann", 100), ("bob", 100), ("cid", 100)], "neighbours run, nothing else does"
        for ident in bad:
            job = await queue.getJob(ident)
            assert job.failedReason.startswith("ForgedJob"), (ident, job.failedReason)
            assert job.attemptsMade == 1, "at once, not after three tries"
        figures(
            "signed-payload",
            name="intruder",
            bad_jobs=len(bad),
            bad_jobs_run=len(paid) - 3,
            naive_bad_jobs_run=len(naive) - 3,
            neighbours_run=sum(who in {"ann", "bob", "cid"} for who, _ in paid),
        )


async def _through(setup, number):
    counts = await setup.counts("payouts")
    return counts.get("completed", 0) + counts.get("failed", 0) == number


async def test_keys_rotate_on_a_live_queue_and_a_removed_key_is_refused(redis_url, tmp_path):
    paid = []
    old, both, new = Signer(KEYS), Signer([NEW_KEY, *KEYS]), Signer([NEW_KEY])
    async with JobSetup.open(redis_url, tmp_path, payout_jobs(paid), signer=old) as setup:
        await setup.producer.enqueue(payout("queued-before"))
        async with setup.working(signer=both):
            assert await setup.ended(payout("queued-before")) == ["completed"]
        await setup.producer.enqueue(payout("forgotten"))
        async with setup.working(signer=new):
            assert await setup.ended(payout("forgotten")) == ["failed"]
        assert "does not know" in (await setup.job(payout("forgotten"))).failedReason
    async with JobSetup.open(redis_url, tmp_path, payout_jobs(paid), signer=both) as setup:
        await setup.producer.enqueue(payout("queued-after"))
        async with setup.working(signer=new):
            assert await setup.ended(payout("queued-after")) == ["completed"]
    assert [to for to, _ in paid] == ["queued-before", "queued-after"]

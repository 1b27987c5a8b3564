"""Jobs that others write, on a queue that we share: their data is the payload, and their options are theirs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from harness.pipelines import JobSetup
from harness.waiting import until
from harness.workers import at_work, counts, queue_at, stock_at_work, until_counts
from studyhall.patterns import dead_letter
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Permanent, Transient
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.request import JobRef
from studyhall.patterns.dead_letter.archive import dead_letters
from studyhall.patterns.idempotency import result_of
from studyhall.patterns.idempotency.once import inboxes, once
from studyhall.patterns.pipeline import Pipeline
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.stall_budget import crash_budget
from studyhall.patterns.typed_jobs import JobTypes, Payload, plain, typed

SHOP = "labels"


class Label(BaseModel):  # as they write it: more fields than we read
    parcel: str
    fails: int = 0


class Ours(Payload):
    parcel: str


class Shop:
    """Prints a label per parcel; `fails` says how often a job fails first."""

    def __init__(self):
        self.printed: list[str] = []
        self.runs: dict[str, int] = {}

    async def theirs(self, ctx, payload: Label):
        runs = self.runs[payload.parcel] = self.runs.get(payload.parcel, 0) + 1
        if payload.fails < 0:
            raise Permanent("no such street")
        if runs <= payload.fails:
            raise Transient("the printer is busy")
        self.printed.append(payload.parcel)
        return payload.parcel

    async def ours(self, ctx, payload: Ours):
        self.printed.append(payload.parcel)
        return payload.parcel

    def pipeline(self, setup):
        others = plain(Label, self.theirs, key=lambda label: label.parcel, retry=RetryPolicy(base=0.01, attempts=4))
        return Pipeline(typed(setup.jobs, otherwise=others), crash_budget(), once(inboxes(setup.store)))


@pytest.fixture
def shop():
    return Shop()


@pytest.fixture
def jobs(shop):
    jobs = JobTypes()
    jobs.register(name="print", payload=Ours, handler=shop.ours, queue=SHOP)
    return jobs


# Every one of them fails twice, so that its attempts matter.
THEIRS: dict[str, dict[str, Any]] = {
    "no-options": {},
    "one-attempt": {"attempts": 1},
    "own-id": {"jobId": "order-7"},
    "removed": {"removeOnFail": True, "removeOnComplete": True},
    "kept-few": {"removeOnFail": {"count": 1}, "attempts": 2, "backoff": {"type": "fixed", "delay": 60_000}},
    "urgent": {"priority": 1},
    "last": {"priority": 2_097_151},
    "lifo": {"lifo": True},
    "later": {"delay": 200},
    "unknown-backoff": {"backoff": {"type": "only-node-knows", "delay": 5}, "attempts": 9},
}


@pytest.mark.needs_node
async def test_jobs_of_a_node_service_run_beside_our_envelopes_whatever_their_options(
    redis_url, redis_server, tmp_path, node_home, spawn, shop, jobs
):
    written = [["print", {"parcel": name, "fails": 2, "etc": [1]}, opts] for name, opts in THEIRS.items()]
    written += [["print", {"parcel": "refused", "fails": -1}, {"removeOnFail": True}]]
    written += [["another name", {"parcel": "named"}, {}], ["print", {"no": "parcel"}, {"removeOnFail": True}]]
    program = node_home / "node_adds.mjs"  # modules are looked up from where the script lies
    shutil.copy(Path(__file__).parent / "programs" / program.name, program)
    node = spawn.command("node", program, redis_server.port, SHOP, json.dumps(written), cwd=node_home)
    async with JobSetup.open(redis_url, tmp_path, jobs, signer=None) as setup, queue_at(redis_url, SHOP) as queue:
        assert await node.exited(60) == 0, node
        await setup.producer.enqueue(JobRequest("print", {"parcel": "ours"}, key="ours"))
        async with at_work(SHOP, shop.pipeline(setup), url=redis_url):

            async def ended():
                states = await counts(queue)
                return set(states) <= {"completed", "failed"}

            await until(ended, 40, "all of them ended")
        redis = producer_client(redis_url)
        await dead_letter.sweep([SHOP], redis, setup.store)
        letters = await dead_letter.find(setup.store, dead_letters.c.queue == SHOP)
        await redis.aclose()
    assert sorted(shop.printed) == sorted([*THEIRS, "named", "ours"]), "each of them, once"
    assert {name: shop.runs[name] for name in THEIRS} == dict.fromkeys(THEIRS, 3), "our policy retries them"
    reasons = sorted(letter.reason for letter in letters)
    assert len(reasons) == 2, "no failure vanishes, although both were to be removed"
    assert "malformed at parcel" in reasons[0]
    assert "no such street" in reasons[1]


async def test_jobs_that_wait_from_the_old_code_run_after_the_upgrade(redis_url, tmp_path, shop, jobs):
    """Waiting, delayed by the stock worker's backoff after a failure, delayed by its producer, and with a priority."""

    async def old(job, token):
        raise ValueError("the old code fails")

    connection = Redis.from_url(redis_url, decode_responses=True, socket_timeout=30)
    async with JobSetup.open(redis_url, tmp_path, jobs, signer=None) as setup, queue_at(redis_url, SHOP) as queue:
        # longer than the old worker needs to stop: it must not get to a second try
        backoff = {"type": "exponential", "delay": 5_000}
        await queue.add("print", {"parcel": "failed once"}, {"attempts": 3, "backoff": backoff, "jobId": "old-1"})
        async with stock_at_work(SHOP, old, connection=connection):
            await until_counts(queue, {"delayed": 1}, 20, "the old worker failed it once")
        assert (await queue.getJob("old-1")).attemptsMade == 1
        await queue.add("print", {"parcel": "waits"}, {})
        await queue.add("print", {"parcel": "ranked"}, {"priority": 10})
        await queue.add("print", {"parcel": "delayed"}, {"delay": 700})
        async with at_work(SHOP, shop.pipeline(setup), url=redis_url):
            await until_counts(queue, {"completed": 4}, 30, "all of them ran")
        assert (await queue.getJob("old-1")).attemptsMade == 2
    await connection.aclose()
    assert sorted(shop.printed) == ["delayed", "failed once", "ranked", "waits"]


async def test_the_same_key_under_the_same_name_is_another_request_on_another_queue(redis_url, tmp_path, shop, jobs):
    """Order 7 is to be packed and to be mailed: equal data, and Node names both jobs `job`."""
    step = plain(Label, shop.theirs, key=lambda label: label.parcel)
    async with (
        JobSetup.open(redis_url, tmp_path, jobs, signer=None) as setup,
        queue_at(redis_url, "pack") as pack,
        queue_at(redis_url, "mail") as mail,
    ):
        pipeline = Pipeline(step, once(inboxes(setup.store)))
        async with at_work("pack", pipeline, url=redis_url), at_work("mail", pipeline, url=redis_url):
            for queue, done in ((pack, 1), (mail, 1), (mail, 2)):
                await queue.add("job", {"parcel": "7"}, {})

                async def ended(queue=queue, done=done):
                    return await counts(queue) == {"completed": done}

                await until(ended, 30, "it ran")
        results = [await result_of(setup.store)(JobRef(name, "job", "", "7")) for name in ("pack", "mail")]
    assert shop.printed == ["7", "7"], "once on each queue"
    assert [stored and stored.result for stored in results] == ["7", "7"]


async def test_of_one_kind_the_same_key_is_one_request_whatever_the_jobs_are_named(redis_url, tmp_path, shop, jobs):
    """Seen on a repair: what was running says `refund`, the new sender says `task`."""
    step = plain(Label, shop.theirs, key=lambda label: label.parcel, kind="labels")
    async with (
        JobSetup.open(redis_url, tmp_path, jobs, signer=None) as setup,
        queue_at(redis_url, "labels") as queue,
        at_work("labels", Pipeline(step, once(inboxes(setup.store))), url=redis_url),
    ):
        for done, name in enumerate(("refund", "task"), 1):
            await queue.add(name, {"parcel": "7"}, {})

            async def ended(done=done):
                return await counts(queue) == {"completed": done}

            await until(ended, 30, "it ran")
    assert shop.printed == ["7"]

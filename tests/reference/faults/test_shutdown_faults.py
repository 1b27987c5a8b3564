"""SIGTERM in the middle of work: exit 0 in time, no stalled event, no attempt consumed, nothing lost or duplicated."""

import asyncio
import json
import random
import time

import pytest

from .ledger import Ledger, ledger_jobs

pytestmark = pytest.mark.fault


@pytest.mark.slow
async def test_sigterms_mid_job_consume_no_attempt_and_stall_nothing(redis_url, tmp_path, spawn, scale, seed, figures):
    rolls, jobs, grace = scale(4, 20), scale(160, 800), 1.0
    rng = random.Random(seed)
    exits = []
    async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
        # Somebody to notice stalled jobs, were there any.
        steady = await ledger.worker(grace=grace, concurrency=2)
        # half of them end within the grace limit, half are cut and released
        for number in range(jobs):
            seconds = 0.2 if number % 2 else 0.3 + grace
            await ledger.producer.enqueue(ledger_jobs.entry(number, seconds=round(seconds, 2)))
        for _ in range(rolls):
            worker = await ledger.worker(grace=grace)
            await worker.line('"start"')
            await asyncio.sleep(rng.random() * 0.3)
            worker.terminate()
            began = time.monotonic()
            assert await worker.exited(grace + 10) == 0
            exits.append(time.monotonic() - began)
        await ledger.worker(grace=grace, concurrency=20)  # for what is left
        await ledger.idle(120)
        released = sum(len(json.loads(line)["released"]) for line in ledger.events("stopped"))
        starts = [json.loads(line) for line in ledger.events("start")]
        entries, counts = await ledger.entries(), await ledger.counts()
        assert steady.returncode is None
        assert released > 0, "no job was cut: the grace limit was never tested"
        assert ledger.events("stalled") == []
        assert {start["attempts_made"] for start in starts} == {0}, "no attempt was consumed"
        assert {start["stalled"] for start in starts} == {0}
        assert len(entries) == jobs
        assert set(entries.values()) == {1}
        assert counts["failed"] == 0
        assert max(exits) < grace + 6
    figures(
        "shutdown",
        name="sigterm",
        sigterms=rolls,
        jobs=jobs,
        grace_seconds=grace,
        slowest_exit_seconds=round(max(exits), 1),
        released=released,
        stalled=len(ledger.events("stalled")),
        lost=jobs - len(entries),
        duplicated=sum(entries.values()) - len(entries),
    )


async def test_the_usual_worker_strands_its_jobs_on_sigterm(redis_url, tmp_path, spawn):
    """The fault is real: closing the stock worker leaves jobs active that only the stalled check brings back."""
    async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
        await ledger.add(20, seconds=3)
        worker = await ledger.worker(naive=True, lock=30, stalled=30)
        while await ledger.counts() and (await ledger.counts())["active"] < 10:
            await asyncio.sleep(0.02)
        worker.terminate()
        await worker.exited(20)
        assert (await ledger.counts())["active"] > 0


async def test_a_second_sigterm_releases_the_jobs_at_once(redis_url, tmp_path, spawn):
    async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
        await ledger.producer.enqueue(ledger_jobs.entry(1, seconds=25))
        worker = await ledger.worker(grace=60)
        await worker.line('"start"')
        worker.terminate()
        await worker.line("draining")
        began = time.monotonic()
        worker.terminate()
        assert await worker.exited(20) == 0
        assert time.monotonic() - began < 10
        counts = await ledger.counts()
        assert counts["active"] == 0
        assert counts["delayed"] + counts["waiting"] + counts["prioritized"] == 1

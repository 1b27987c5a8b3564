"""Crashes of workers: nothing lost, nothing failed, nothing duplicated; the usual worker loses and duplicates."""

import asyncio
import json
import random
import time
from functools import partial

import pytest

from harness.waiting import until
from studyhall.patterns.stall_budget import CRASH_LIMIT

from .ledger import Ledger, ledger_jobs

pytestmark = pytest.mark.fault


@pytest.mark.slow
async def test_random_kills_lose_fail_and_duplicate_nothing(redis_url, tmp_path, spawn, scale, seed, figures):
    jobs, kills = scale(250, 1000), scale(5, 20)
    rng = random.Random(seed)
    async with Ledger.open(redis_url, tmp_path / "ours", spawn) as ledger:
        await ledger.add(jobs, seconds=0.3)
        # few at once: the work must outlast the kills
        await ledger.worker(concurrency=5)
        await ledger.worker(concurrency=5)
        killed = await ledger.kill_at_random(kills, jobs, rng, ledger_jobs.ledger, concurrency=5)
        began = time.monotonic()
        await ledger.idle()
        settled = time.monotonic() - began
        entries, counts = await ledger.entries(), await ledger.counts()
    lost = jobs - len(entries)
    duplicated = sum(1 for times in entries.values() if times > 1)
    assert (killed, lost, counts["failed"], duplicated) == (kills, 0, 0, 0)

    naive_jobs, naive_kills = jobs, kills
    async with Ledger.open(redis_url, tmp_path / "naive", spawn) as ledger:
        await ledger.queue.obliterate(True)
        await ledger.add(naive_jobs, seconds=0.3)
        await ledger.worker(naive=True, concurrency=5)
        await ledger.worker(naive=True, concurrency=5)
        await ledger.kill_at_random(naive_kills, naive_jobs, rng, ledger_jobs.naive_ledger, naive=True, concurrency=5)
        await ledger.idle()
        naive, naive_counts = await ledger.entries(ledger_jobs.naive_ledger), await ledger.counts()
    naive_duplicated = sum(1 for times in naive.values() if times > 1)
    assert naive_duplicated > 0, "the kills hit nothing: this run proves nothing"
    figures(
        "stall-budget",
        name="random-kills",
        jobs=jobs,
        kills=kills,
        lost=lost,
        failed=counts["failed"],
        duplicated=duplicated,
        seconds_to_settle=round(settled, 1),
        naive_jobs=naive_jobs,
        naive_kills=naive_kills,
        naive_duplicated=naive_duplicated,
        naive_failed=naive_counts["failed"],
        naive_lost=naive_jobs - len(naive),
    )


@pytest.mark.parametrize("point", ["before-effect", "inside-effect", "after-effect-before-ack", "after-ack"])
async def test_kill_at_a_named_point_leaves_one_effect(redis_url, tmp_path, spawn, point):
    async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
        victim = await ledger.worker()
        await ledger.producer.enqueue(ledger_jobs.entry(1, crash_at=point))
        assert await victim.exited(20) == -9, "the worker did not die at that point"
        await ledger.worker()
        await ledger.idle()
        assert await ledger.entries() == {1: 1}
        assert (await ledger.counts())["completed"] == 1


@pytest.mark.slow
async def test_a_job_that_kills_every_worker_is_given_up_after_its_crash_budget(
    redis_url, tmp_path, spawn, scale, figures
):
    budget = scale(3, CRASH_LIMIT)
    async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
        # Not at once: the worker says that it is ready before it dies.
        killer = await ledger.producer.enqueue(ledger_jobs.entry(1, seconds=0.3, crash_at="always"))
        await ledger.producer.enqueue(ledger_jobs.entry(2))
        deaths = 0
        while deaths <= budget:  # a budget of 3 is used up by the fourth
            victim = await ledger.worker(crash_limit=budget)
            assert await victim.exited(30) == -9, "the job did not kill its worker"
            deaths += 1
        survivor = await ledger.worker(crash_limit=budget)
        await ledger.idle()
        assert survivor.returncode is None
        entries, counts = await ledger.entries(), await ledger.counts()
        job = await ledger.queue.getJob(killer.id)
    assert entries == {2: 1}, "its neighbour runs, the crashing job does not"
    assert counts["failed"] == 1
    assert job is not None
    assert "CrashLoop" in job.failedReason
    assert f"died {deaths} times" in job.failedReason
    assert job.attemptsMade == 1, "no crash consumed an attempt"
    figures(
        "stall-budget",
        name="crash-loop",
        crash_limit=budget,
        workers_killed=deaths,
        given_up=counts["failed"],
        neighbours_run=len(entries),
    )


@pytest.mark.slow
async def test_recovery_after_a_kill_at_default_settings_takes_less_than_ten_seconds(
    redis_url, tmp_path, spawn, figures
):
    async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
        victim = await ledger.worker(lock=0)
        await ledger.producer.enqueue(ledger_jobs.entry(1, seconds=0.5))
        await victim.line('"start"')
        victim.kill()
        died = time.monotonic()
        successor = await ledger.worker(lock=0)
        await successor.line('"start"', 30)
        recovery = time.monotonic() - died
        await ledger.idle()
        assert await ledger.entries() == {1: 1}
        assert recovery < 10
    figures("stall-budget", name="recovery", recovery_seconds=round(recovery, 1))


@pytest.mark.slow
async def test_busy_cpus_cause_no_false_stall_at_default_settings(redis_url, tmp_path, spawn, scale, figures):
    burn = [spawn.command("python3", "-c", "while True: pass") for _ in range(4)]
    try:
        async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
            workers = [await ledger.worker(lock=0), await ledger.worker(lock=0)]
            await ledger.add(scale(200, 2000), seconds=0.05)
            # long enough to outlive several locks, now and then blocking the loop for a quarter of one
            for number in range(90_000, 90_000 + 4):
                await ledger.producer.enqueue(ledger_jobs.entry(number, seconds=scale(9, 20), block=1.5))
            await ledger.idle(120)
            stalled = ledger.events("stalled") + ledger.events("lost")
            entries = await ledger.entries()
            assert len(workers) == 2
            assert stalled == []
            assert set(entries.values()) == {1}
    finally:
        for hog in burn:
            hog.close()
    figures("stall-budget", name="cpu-load", jobs=len(entries), false_stalls=len(stalled))


async def test_an_event_loop_blocked_longer_than_the_lock_runs_the_effect_once(redis_url, tmp_path, spawn):
    """SIGSTOP freezes the whole process, lock renewal included, for longer than the lock."""
    async with Ledger.open(redis_url, tmp_path, spawn) as ledger:
        frozen = await ledger.worker(lock=1.5)
        await ledger.producer.enqueue(ledger_jobs.entry(1, seconds=1.0))
        await frozen.line('"start"')
        frozen.stop_signal()
        successor = await ledger.worker(lock=1.5)
        start = json.loads(await successor.line('"start"', 20))
        assert start["stalled"] >= 1, "the second run came from a lost lock, so the fault happened"
        frozen.cont()
        await ledger.idle()
        await frozen.line('"lost"', 20)
        assert await ledger.entries() == {1: 1}
        assert (await ledger.counts())["completed"] == 1


@pytest.mark.slow
async def test_redis_killed_and_restarted_loses_no_job(own_redis, tmp_path, spawn, scale, figures):
    # Ten jobs at once, 50 ms each: 200 a second at most, so that neither restart finds the queue empty, however
    # fast the machine is.
    jobs = scale(800, 4_000)
    async with Ledger.open(own_redis.url, tmp_path, spawn) as ledger:
        await ledger.add(jobs, seconds=0.05)
        # AOF everysec: what was acknowledged within the last second before a crash of Redis may be gone, so the
        # jobs are on disk before the first kill.
        await asyncio.sleep(1.5)
        await ledger.worker(concurrency=5)
        await ledger.worker(concurrency=5)
        back = []
        waiting = []
        for mark in (jobs // 4, jobs // 2):
            await until(partial(ledger.reached, mark), 120, f"{mark} effects")
            own_redis.restart()
            before, began = await ledger.effects(), time.monotonic()
            waiting.append(jobs - before)
            # more than what was in flight: these were fetched after the restart
            await until(partial(ledger.reached, before + 50), 30, "consuming again")
            back.append(round(time.monotonic() - began, 1))
        await ledger.idle(180)
        entries, counts = await ledger.entries(), await ledger.counts()
    assert min(waiting) > 50, "Redis was killed in the middle of the work"
    lost, duplicated = jobs - len(entries), sum(1 for times in entries.values() if times > 1)
    assert (lost, duplicated, counts["failed"]) == (0, 0, 0)
    assert max(back) < 10
    figures(
        "stall-budget",
        name="redis-killed",
        jobs=jobs,
        redis_kills=len(back),
        lost=lost,
        duplicated=duplicated,
        consuming_again_seconds=max(back),
    )

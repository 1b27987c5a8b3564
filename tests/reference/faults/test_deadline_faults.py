"""Deadline with real processes and a real queue: hung work releases its slot and stays dead."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from bullmq import Queue, Worker
from redis.asyncio import Redis

from harness.processes import alive
from harness.waiting import until
from studyhall.patterns.deadline import DeadlineExceeded, owned_process, run_within

SLOW_CHARGE = str(Path(__file__).parent / "programs" / "slow_charge.py")


@pytest.mark.fault
async def test_timed_out_subprocess_is_killed_with_its_children_and_never_charges(tmp_path, figures):
    gate = tmp_path / "gate"

    def argv(charges):
        return [sys.executable, SLOW_CHARGE, str(gate), str(tmp_path / charges), "--through-a-child"]

    async def naive():
        process = await asyncio.create_subprocess_exec(*argv("naive"), stdout=PIPE)
        zombies.append(process)
        assert process.stdout
        await process.stdout.readline()  # it works by now
        await process.wait()

    async def owned():
        async with owned_process(*argv("owned"), stdout=PIPE) as process:
            stopped.append(process)
            assert process.stdout
            await process.stdout.readline()
            await process.wait()

    zombies = []
    stopped = []
    try:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(naive(), 0.5)
            with pytest.raises(DeadlineExceeded):
                await run_within(0.5, owned)
        assert all(alive(process.pid) for process in zombies), "the naive twin stopped waiting, not the work"
        assert not any(alive(process.pid) for process in stopped)
    finally:
        gate.touch()
    for process in zombies:
        await process.communicate()
    charged = {
        name: len((tmp_path / name).read_text().splitlines()) if (tmp_path / name).exists() else 0
        for name in ("naive", "owned")
    }
    assert charged == {"naive": 3, "owned": 0}
    figures(
        "deadline",
        name="timed-out processes",
        attempts=len(stopped),
        charges_naive=charged["naive"],
        charges_owned=charged["owned"],
    )


@pytest.mark.fault
async def test_hung_jobs_release_their_slots_where_they_block_the_queue_without_a_deadline(redis_url, figures):
    slots, others = 2, 20

    async def work(job):
        if job.name == "hung":
            await asyncio.Event().wait()

    async def naive(job, token):
        await work(job)

    async def limited(job, token):
        await run_within(0.2, work, job)

    async def run(name, processor, patience):
        connection = Redis.from_url(redis_url, decode_responses=True, socket_timeout=30)
        queue = Queue(name, {"connection": connection})
        for _ in range(slots):
            await queue.add("hung", {})
        for _ in range(others):
            await queue.add("quick", {})
        options = {"connection": connection, "concurrency": slots, "autorun": False}
        worker = Worker(name, processor, options)
        running = asyncio.create_task(worker.run())

        async def finished():
            return bool(await queue.getCompletedCount() == others)

        with contextlib.suppress(AssertionError):
            await until(finished, timeout=patience, what="the quick jobs ran")
        counts = await queue.getJobCounts("active", "completed", "failed")
        await worker.close(force=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await queue.close()
        await connection.aclose()
        return counts

    without, within = await run("no-limit", naive, 2), await run("limit", limited, 20)
    assert without["completed"] == 0, "the hung jobs kept every slot"
    assert without["active"] == slots, "and their locks were renewed all the time"
    assert within == {"active": 0, "completed": others, "failed": slots}
    figures(
        "deadline",
        name="hung jobs",
        hung=slots,
        others=others,
        others_ran_without=without["completed"],
        others_ran_with=within["completed"],
    )

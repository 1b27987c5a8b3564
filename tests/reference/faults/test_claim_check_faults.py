"""Producers killed between blob and job: no job without its blob, no blob forever without its job."""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

import pytest

from harness.pipelines import JobSetup
from harness.waiting import until
from studyhall.patterns.claim_check import Blobs, needed_by_jobs
from studyhall.patterns.dead_letter import needed_by_dead_letters

PROGRAM = Path(__file__).parent / "programs" / "claim_producers.py"
sys.path.insert(0, str(PROGRAM.parent))

import claim_producers as program  # noqa: E402

pytestmark = pytest.mark.fault


@pytest.mark.slow
async def test_killed_producers_leave_no_job_without_its_blob_and_no_blob_forever(
    redis_url, tmp_path, spawn, scale, seed, figures
):
    kills, rng = scale(4, 20), random.Random(seed)
    outcome = {}
    for way in ("naive", "ours"):
        folder = tmp_path / way / "blobs"
        (tmp_path / way).mkdir()
        blobs = Blobs(folder)
        async with JobSetup.open(redis_url, tmp_path / way, program.job_types(blobs)) as setup:
            setup.signer = None  # type: ignore[assignment]  # the killed producers of this proof do not sign
            await setup.producer.queue(program.QUEUE).obliterate(True)
            for number in range(kills):
                arguments = [f"--redis={redis_url}", f"--blobs={folder}", f"--start={number * 10**6}"]
                victim = spawn(PROGRAM, *arguments, *(["--naive"] if way == "naive" else []))
                await victim.line("ready")
                await asyncio.sleep(0.3 + rng.random() * 0.2)
                victim.kill()
            sweeps = 0
            needed = needed_by_jobs(setup.producer.redis, needed_by_dead_letters(setup.store))
            for path in folder.rglob("*"):  # hours later
                os.utime(path, (time.time() - 7200, time.time() - 7200))
            swept = await blobs.sweep(program.QUEUE, needed)
            sweeps += swept.deleted
            async with setup.working(signer=None):
                await until(lambda setup=setup: _idle(setup), 60, "all jobs ended", every=0.1)
            counts = await setup.counts(program.QUEUE)
            left = sum(path.is_file() for path in folder.rglob("*"))
            outcome[way] = {
                "jobs": counts.get("completed", 0) + counts.get("failed", 0),
                "without_blob": counts.get("failed", 0),
                "swept": sweeps,
                "blobs": left,
            }
    naive, ours = outcome["naive"], outcome["ours"]
    assert naive["without_blob"] > 0, "no kill hit the gap: this run proves nothing"
    assert ours["swept"] > 0, "no kill hit the gap: this run proves nothing"
    assert ours["without_blob"] == 0
    assert ours["jobs"] > kills
    assert ours["blobs"] == ours["jobs"], "what is left belongs to a job"
    figures(
        "claim-check",
        name="killed-producers",
        kills=kills,
        jobs=ours["jobs"],
        jobs_without_blob=ours["without_blob"],
        orphans_swept=ours["swept"],
        naive_jobs=naive["jobs"],
        naive_jobs_without_blob=naive["without_blob"],
    )


async def _idle(setup):
    counts = await setup.counts(program.QUEUE)
    return not set(counts) & {"waiting", "prioritized", "active", "delayed"}

"""A long import under SIGKILL and SIGSTOP: at most a batch per kill is done again, no row is kept twice."""

import json
import random
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select

from harness.pipelines import full_producer
from harness.processes import Spawned
from harness.waiting import until
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import read
from studyhall.patterns.producer import JobRequest

PROGRAM = Path(__file__).parent / "programs" / "checkpoint_worker.py"
sys.path.insert(0, str(PROGRAM.parent))

import checkpoint_worker as program  # noqa: E402

pytestmark = pytest.mark.fault


class Imports:
    def __init__(self, url, store_url, spawn):
        self.url, self.store_url, self.spawn = url, store_url, spawn
        self.workers: list[Spawned] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, url, folder, spawn):
        folder.mkdir(exist_ok=True, parents=True)
        self = cls(url, f"sqlite:///{folder / 'imports.db'}", spawn)
        self.store = open_store(self.store_url)
        await create_all(self.store)
        self.producer = full_producer(program.job_types(), url)
        try:
            yield self
        finally:
            for worker in self.workers:
                worker.close()
            await self.producer.close()
            await close(self.store)

    async def worker(self):
        worker = self.spawn(PROGRAM, f"--redis={self.url}", f"--store={self.store_url}")
        await worker.line('"ready"')
        self.workers.append(worker)
        return worker

    async def add(self, **payload: object):
        request = JobRequest("import", payload, key=f"import-{'naive' if payload.get('naive') else 'ours'}")
        await self.producer.enqueue(request)
        return request

    async def rows(self, table):
        async with read(self.store) as connection:
            return list(await connection.scalars(select(table.c.row).order_by(table.c.id)))

    async def count(self, table):
        async with read(self.store) as connection:
            return int(await connection.scalar(select(func.count()).select_from(table)) or 0)

    async def finished(self, request):
        ref = self.producer.ref(request)
        queue = self.producer.queue(ref.queue)

        async def completed():
            state = await queue.getJobState(ref.id)
            assert state != "failed", (await queue.getJob(ref.id)).failedReason
            return bool(state == "completed")

        await until(completed, 120, "the import is completed", every=0.1)

    async def kill_along_the_way(self, kills, marks, rng):
        """SIGKILL the worker after every so many rows; another takes its place."""
        worker = await self.worker()
        for mark in marks[:kills]:
            await until(lambda mark=mark: self._reached(mark), 60, f"{mark} rows", every=0.005)
            worker.kill()
            worker = await self.worker()

    async def _reached(self, mark):
        return await self.count(program.worked) >= mark


@pytest.mark.slow
async def test_kills_cost_at_most_a_batch_each_where_a_restart_repeats_everything(
    redis_url, tmp_path, spawn, scale, seed, figures
):
    rows, kills, batch = scale(2_000, 10_000), scale(3, 10), 100
    naive_rows, naive_kills = scale(600, 2_000), scale(2, 5)
    rng = random.Random(seed)
    async with Imports.open(redis_url, tmp_path / "ours", spawn) as imports:
        request = await imports.add(rows=rows, batch=batch, pause=0.05)
        marks = [rows * (number + 1) // (kills + 1) + rng.randrange(batch) for number in range(kills)]
        await imports.kill_along_the_way(kills, marks, rng)
        await imports.finished(request)
        worked, kept = await imports.rows(program.worked), await imports.rows(program.kept)
        ended = [worker for worker in imports.workers if worker.returncode is not None]
    reprocessed = len(worked) - rows
    assert len(ended) == kills, "every kill hit a running worker"
    assert kept == list(range(rows)), "every row once, in order"
    assert 0 < reprocessed <= kills * batch, "the kills hit work in progress, and cost a batch each at most"

    async with Imports.open(redis_url, tmp_path / "naive", spawn) as imports:
        request = await imports.add(rows=naive_rows, batch=batch, pause=0.05, naive=True)
        marks = [naive_rows * (number + 1) * 2 // 3 for number in range(naive_kills)]
        await imports.kill_along_the_way(naive_kills, marks, rng)
        await imports.finished(request)
        naive_worked, naive_kept = await imports.rows(program.worked), await imports.rows(program.kept)
    naive_reprocessed = len(naive_worked) - naive_rows
    assert naive_reprocessed > naive_kills * batch, "the restart repeated less than ours may: nothing proven"
    assert len(naive_kept) > naive_rows, "and it kept rows twice"
    figures(
        "checkpoint",
        name="kills",
        rows=rows,
        kills=kills,
        batch=batch,
        reprocessed=reprocessed,
        reprocessed_limit=kills * batch,
        kept_twice=len(kept) - rows,
        naive_rows=naive_rows,
        naive_kills=naive_kills,
        naive_reprocessed=naive_reprocessed,
        naive_kept_twice=len(naive_kept) - naive_rows,
    )


@pytest.mark.slow
async def test_a_frozen_run_that_wakes_up_after_it_was_taken_over_cannot_save(redis_url, tmp_path, spawn, figures):
    """SIGSTOP in the middle of a batch, for longer than the lock: two runs believe that the batch is theirs."""
    rows, batch = 1_000, 100
    async with Imports.open(redis_url, tmp_path, spawn) as imports:
        frozen = await imports.worker()
        request = await imports.add(rows=rows, batch=batch, pause=0.4)
        await frozen.line('"first": 200')
        frozen.stop_signal()
        successor = await imports.worker()
        resumed = json.loads(await successor.line('"run"', 30))
        await successor.line('"first": 400', 30)
        frozen.cont()  # its batch is finished in its memory; it now tries to save rows 200 to 299 again
        await frozen.line('"overtaken", "pid"', 20)
        await imports.finished(request)
        await frozen.line('"lost"', 20)
        kept = await imports.rows(program.kept)
        assert resumed["start"] == 200, "the successor began with the batch that the frozen run was in"
        assert kept == list(range(rows)), "no row twice, none missing"
        worked = await imports.rows(program.worked)
        assert worked.count(200) == 2, "both runs worked on that batch, so the fault happened"
    figures(
        "checkpoint",
        name="frozen-run",
        rows=rows,
        runs_in_the_same_batch=worked.count(200),
        kept_twice=len(kept) - rows,
    )

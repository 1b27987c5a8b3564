"""Drives the ledger workers of the fault suite: enqueue, kill, wait, count."""

import asyncio
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import func, select

from harness.pipelines import full_producer
from harness.processes import Spawned
from harness.waiting import until
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import read
from studyhall.patterns.signed_payload import Signer

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))

import ledger_jobs  # noqa: E402

WORKER = PROGRAMS / "ledger_worker.py"


class Ledger:
    """One queue, one database, and the workers on them."""

    def __init__(self, redis_url, directory, spawn):
        self.redis_url, self.directory, self.spawn = redis_url, directory, spawn
        self.store_url = f"sqlite:///{directory / 'ledger.db'}"
        self.scratch = directory / "crashed"
        self.workers: list[Spawned] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, redis_url, directory, spawn):
        directory.mkdir(parents=True, exist_ok=True)
        self = cls(redis_url, directory, spawn)
        self.store = open_store(self.store_url)
        await create_all(self.store)
        self.producer = full_producer(ledger_jobs.job_types(), redis_url, signer=Signer(ledger_jobs.KEYS))
        self.queue = self.producer.queue(ledger_jobs.QUEUE)
        try:
            yield self
        finally:
            for worker in self.workers:
                worker.close()
            await self.producer.close()
            await close(self.store)

    async def add(self, count, **fields):
        for start in range(0, count, 500):
            await self.producer.enqueue_many(
                [ledger_jobs.entry(number, **fields) for number in range(start, min(start + 500, count))]
            )

    async def worker(self, *, lock=1.5, stalled=0.5, **options):
        args = [f"--{name}={value}" for name, value in options.items() if value is not True]
        args += [f"--{name}" for name, value in options.items() if value is True]
        worker = self.spawn(
            WORKER,
            f"--redis={self.redis_url}",
            f"--store={self.store_url}",
            f"--scratch={self.scratch}",
            f"--lock={lock}",
            f"--stalled={stalled}",
            *args,
        )
        self.workers.append(worker)
        await worker.line('"ready"')
        return worker

    async def counts(self):
        return await self.queue.getJobCounts()

    async def entries(self, table=ledger_jobs.ledger):
        """entry -> how often its effect happened"""
        async with read(self.store) as connection:
            rows = await connection.execute(select(table.c.entry, func.count()).group_by(table.c.entry))
            return {row[0]: row[1] for row in rows}

    async def effects(self, table=ledger_jobs.ledger):
        async with read(self.store) as connection:
            return int(await connection.scalar(select(func.count()).select_from(table)) or 0)

    async def idle(self, limit=60):
        """Until no job waits, runs or is delayed."""

        async def nothing_left():
            counts = await self.counts()
            return not any(counts[state] for state in ("waiting", "prioritized", "delayed", "active"))

        await until(nothing_left, limit, "every job reached its end", every=0.1)

    async def kill_at_random(self, kills, total, rng, table, **options):
        """SIGKILL a random worker each time another share of the work is done; a new one takes its place."""
        done = 0
        for number in range(1, kills + 1):
            mark = total * number // (kills + 1)
            await until(partial(self.reached, mark, table), 60, f"{mark} effects before kill {number}", every=0.01)
            await asyncio.sleep(rng.random() * 0.05)
            await until(self._busy, 30, f"jobs to be running at kill {number}", every=0.01)
            victim = rng.choice([worker for worker in self.workers if worker.returncode is None])
            victim.kill()
            done += 1
            await self.worker(**options)  # ready first: killing a worker that still boots proves nothing
        return done

    async def reached(self, mark, table=ledger_jobs.ledger):
        return await self.effects(table) >= mark

    async def _busy(self):
        return (await self.counts())["active"] >= 4

    def events(self, name):
        return [line for worker in self.workers for line in worker.lines() if f'"event": "{name}"' in line]

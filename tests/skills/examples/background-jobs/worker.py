# [worker]
# worker.py
import asyncio
import contextlib
import os

from jobs import jobs
from patterns import dead_letter, store
from patterns.bullmq_worker import ReliableWorker
from patterns.connections import producer_client
from patterns.observability import configure_logging
from patterns.pipeline import Pipeline
from patterns.shutdown import run_until_signalled


class Sweeper:
    """Archives failed jobs; runs in every process, sweeps do not collide."""

    def __init__(self, redis, engine):
        self.redis, self.engine, self.stop = redis, engine, asyncio.Event()

    async def run(self):
        while not self.stop.is_set():
            with contextlib.suppress(Exception):  # outage: next round
                await dead_letter.sweep(jobs.queues, self.redis, self.engine)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), 5)

    async def drain(self, grace):
        self.stop.set()
        return []


async def main():
    configure_logging()
    url = os.environ["REDIS_URL"]
    engine = store.open_store(os.environ["DATABASE_URL"])  # or sqlite:////absolute/path.db
    await store.create_all(engine)
    pipeline = Pipeline(jobs, engine)
    workers = [ReliableWorker(queue, pipeline, url=url, concurrency=20) for queue in jobs.queues]
    await run_until_signalled([*workers, Sweeper(producer_client(url), engine)], grace=25)


if __name__ == "__main__":
    asyncio.run(main())
# [/worker]

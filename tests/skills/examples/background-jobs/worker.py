# [worker]
# worker.py
import asyncio
import logging
import os

from jobs import jobs
from patterns import dead_letter, store
from patterns.bullmq_worker import ReliableWorker
from patterns.connections import producer_client
from patterns.observability import configure_logging
from patterns.pipeline import Pipeline
from patterns.shutdown import run_until_signalled
from patterns.timers import every


async def alert(letter):  # tell a person
    logging.error("dead letter %s %s: %s", letter.queue, letter.job_id, letter.reason)


class Sweeper:  # archives failed jobs; one in each process is fine
    def __init__(self, *args):
        self.args, self.stop = args, asyncio.Event()

    async def run(self):  # an outage is logged, the next round does it
        await every(5, lambda: dead_letter.sweep(jobs.queues, *self.args, alert=alert), stop=self.stop)

    async def drain(self, grace):
        self.stop.set()
        return []


async def main():
    configure_logging()
    url = os.environ["REDIS_URL"]
    engine = store.open_store(os.environ["DATABASE_URL"])  # postgresql://… or sqlite:////absolute/path.db
    await store.create_all(engine)
    pipeline = Pipeline(jobs, engine)
    workers = [ReliableWorker(queue, pipeline, url=url, concurrency=20) for queue in jobs.queues]
    await run_until_signalled([*workers, Sweeper(producer_client(url), engine)], grace=25)


if __name__ == "__main__":
    asyncio.run(main())
# [/worker]

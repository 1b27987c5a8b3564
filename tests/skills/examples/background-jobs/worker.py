# [worker]
# worker.py
import asyncio
import logging
import os

from jobs import jobs
from patterns import dead_letter
from patterns.core.open_store import create_all, open_store
from patterns.bullmq_worker import ReliableWorker
from patterns.core.clock import Periodic
from patterns.core.connections import producer_client
from patterns.deadline import within_deadline
from patterns.idempotency.once import inboxes, once
from patterns.observability import configure_logging, logged
from patterns.pipeline import Pipeline
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import typed


async def alert(letter):  # tell a person
    logging.error("dead letter %s %s: %s", letter.queue, letter.job_id, letter.reason)


async def main():
    configure_logging()
    url = os.environ["REDIS_URL"]
    store = open_store(os.environ["DATABASE_URL"])  # postgresql://… or sqlite:////absolute/path.db
    await create_all(store)
    # An execution is this list, from the outside in; each step belongs to a pattern.
    pipeline = Pipeline(logged(), typed(jobs), crash_budget(), once(inboxes(store)), within_deadline())
    workers = [ReliableWorker(queue, pipeline, url=url, concurrency=20) for queue in jobs.queues]
    redis = producer_client(url)
    sweeper = Periodic("sweep", lambda: dead_letter.sweep(jobs.queues, redis, store, alert), every=5)
    await run_until_signalled([*workers, sweeper], grace=25)


if __name__ == "__main__":
    asyncio.run(main())
# [/worker]

"""python worker.py: one call per task, never two, until SIGTERM."""

import asyncio
import json
import os

import httpx2 as httpx
from sqlalchemy import Column, Table, Text, insert

from jobs import QUEUE, Task, key_of
from patterns.bullmq_worker import ReliableWorker
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import metadata
from patterns.dead_letter.sweeping import sweeping
from patterns.deadline import within_deadline
from patterns.idempotency.once import inboxes, once
from patterns.observability import configure_logging, logged
from patterns.outside_call import OutsideCalls
from patterns.outside_call.http import answer_of
from patterns.outside_call.store import StoreLedger
from patterns.pipeline import Done, JobContext, Pipeline
from patterns.retry import surviving
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import plain

key = Column("key", Text, primary_key=True)
results = Table("results", metadata, key, Column("answer", Text, nullable=False))


class Provider:
    """The handler's `ctx.services`. The provider's documentation has the numbers."""

    def __init__(self, store):
        # Seconds after which the provider no longer works on a request.
        longest = float(os.environ.get("PROVIDER_LONGEST", "30"))
        url = os.environ["PROVIDER_URL"]
        self.http = httpx.AsyncClient(base_url=url, timeout=longest)
        self.calls = OutsideCalls(
            StoreLedger(store),
            "provider",
            longest=longest,
            look_up=self.find,  # None: what is unclear waits for a human
            tries=1_000,
        )

    async def find(self, reference: str):
        answer = await self.http.get(f"/messages/{reference}")
        return None if answer.status_code == 404 else answer.raise_for_status().json()


async def handle(ctx: JobContext, task: Task) -> Done:
    def send(reference: str):  # the same in every run, and what `find` looks for
        body = {"reference": reference, **task.model_dump()}
        return answer_of(ctx.services.http.post("/messages", json=body))

    answer = await ctx.services.calls.once(ctx.key, send)  # or the recorded answer

    async def save(tx):  # commits with the marker that stops a second run
        await tx.execute(insert(results).values(key=ctx.key, answer=json.dumps(answer)))

    return Done(answer, save)


async def main():
    configure_logging()
    url = os.environ["REDIS_URL"]
    store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    provider = Provider(store)
    pipeline = Pipeline(
        logged(),
        plain(Task, handle, key=key_of, kind=QUEUE, retry=surviving(3600), deadline=90),
        crash_budget(5),
        once(inboxes(store)),
        within_deadline(),
        services=provider,
    )
    worker = ReliableWorker(QUEUE, pipeline, url=url, concurrency=20)
    await run_until_signalled([worker, sweeping([QUEUE], store, url)], grace=25)
    await provider.calls.close()  # an answer on its way is still recorded
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())

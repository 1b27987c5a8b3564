# [use]
from sqlalchemy import Column, Integer, Table, insert

from patterns.checkpoint import checkpointed
from patterns.core.store import metadata
from patterns.idempotency.once import inboxes, once
from patterns.pipeline import Done, JobContext, Pipeline
from patterns.progress import reporting
from patterns.typed_jobs import Payload, typed

imported = Table("imported", metadata, Column("row", Integer, primary_key=True))
BATCH = 100


class Import(Payload):
    rows: int


async def import_rows(ctx: JobContext, payload: Import) -> Done:
    first = ctx.checkpointed or 0  # None on a first run; else where the last run got to
    for start in range(first, payload.rows, BATCH):
        batch = range(start, min(start + BATCH, payload.rows))

        async def save(tx, batch=batch) -> None:
            await tx.execute(insert(imported), [{"row": row} for row in batch])

        await ctx.checkpoint(batch.stop, save)  # rows and position in one transaction
        await ctx.progress("importing", 100 * batch.stop / payload.rows, f"{batch.stop} of {payload.rows}")
    return Done({"rows": payload.rows})  # the checkpoint is cleared with the marker


def pipeline(jobs, store) -> Pipeline:  # ctx.progress and ctx.checkpoint come from the last two steps
    return Pipeline(typed(jobs), once(inboxes(store)), reporting(), checkpointed(store))


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from sqlalchemy import select

    from patterns.core.open_store import close, create_all, open_store
    from patterns.core.store import read
    from patterns.bullmq_worker import ReliableWorker
    from patterns.producer import JobRequest, Producer
    from patterns.core.job import RetryPolicy
    from patterns.typed_jobs import JobTypes, validated

    starts, jobs, store = [], JobTypes(), open_store(store_url)
    await create_all(store)

    async def crashing(ctx: JobContext, payload: Import) -> Done:
        starts.append(ctx.checkpointed)
        whole = 200 if ctx.attempt == 1 else payload.rows
        done = await import_rows(ctx, Import(rows=whole))
        if ctx.attempt == 1:
            raise RuntimeError("dies after two batches")
        return done

    jobs.register(name="import", payload=Import, handler=crashing, retry=RetryPolicy(base=0.01, cap=0.02, attempts=3))
    producer = Producer(redis_url, validated(jobs))
    await producer.enqueue(JobRequest("import", Import(rows=350), key="file-1"))
    worker = ReliableWorker("default", pipeline(jobs, store), url=redis_url)
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        while await producer.queue("default").getCompletedCount() < 1:
            await asyncio.sleep(0.02)
    await worker.drain(5)
    await running
    assert starts == [None, 200], starts
    async with read(store) as tx:
        assert len((await tx.execute(select(imported))).all()) == 350
    await producer.close()
    await close(store)

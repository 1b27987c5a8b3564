# [use]
from sqlalchemy import Column, Integer, Table, insert

from patterns.pipeline import Done, JobContext
from patterns.store import metadata
from patterns.typed_jobs import Payload

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


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from sqlalchemy import select

    from patterns import store
    from patterns.bullmq_worker import ReliableWorker
    from patterns.pipeline import Pipeline
    from patterns.producer import JobRequest, Producer
    from patterns.retry import RetryPolicy
    from patterns.typed_jobs import JobTypes

    starts, jobs, engine = [], JobTypes(), store.open_store(store_url)
    await store.create_all(engine)

    async def crashing(ctx: JobContext, payload: Import) -> Done:
        starts.append(ctx.checkpointed)
        whole = 200 if ctx.attempt == 1 else payload.rows
        done = await import_rows(ctx, Import(rows=whole))
        if ctx.attempt == 1:
            raise RuntimeError("dies after two batches")
        return done

    jobs.register(
        name="import", payload=Import, handler=crashing, retry=RetryPolicy(base=0.01, cap=0.02, attempts=3)
    )
    producer = Producer(jobs, redis_url)
    await producer.enqueue(JobRequest("import", Import(rows=350), key="file-1"))
    worker = ReliableWorker("default", Pipeline(jobs, engine), url=redis_url)
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        while await producer.queue("default").getCompletedCount() < 1:
            await asyncio.sleep(0.02)
    await worker.drain(5)
    await running
    assert starts == [None, 200], starts
    async with store.read(engine) as tx:
        assert len((await tx.execute(select(imported))).all()) == 350
    await producer.close()
    await store.close(engine)

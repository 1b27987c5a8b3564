"""A Redis that lost its data, and orders that notice."""

import time

from bullmq import Queue
from sqlalchemy import Column, Float, String, Table, insert, select

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.store import begin, metadata, read
from studyhall.patterns.job_ids import job_id
from studyhall.patterns.reconciliation import Expected, reconcile

orders = Table(
    "proof_open_orders",
    metadata,
    Column("id", String, primary_key=True),
    Column("since", Float, nullable=False),
    Column("shipped", Float),
)


async def test_jobs_that_redis_lost_come_back_once_and_the_report_names_them(store, own_redis, figures):
    client = producer_client(own_redis.url)
    queue = Queue("ship", {"connection": client})

    async def ship(order):
        await queue.add("ship", {"order": order}, {"jobId": job_id("ship", order)})

    async def unshipped():
        async with read(store) as connection:
            for row in await connection.execute(select(orders).where(orders.c.shipped.is_(None))):
                yield Expected(row.id, row.since)

    async def queued(keys):
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(queue.toKey(job_id("ship", key)))
        return {key for key, there in zip(keys, await pipe.execute(), strict=True) if there}

    long_ago = time.time() - 3600
    async with begin(store) as tx:
        rows = [{"id": f"o-{n}", "since": long_ago, "shipped": None} for n in range(100)]
        await tx.execute(insert(orders), rows)
        await tx.execute(insert(orders).values(id="done", since=long_ago, shipped=1.0))
        await tx.execute(insert(orders).values(id="new", since=time.time(), shipped=None))
    for n in range(100):
        await ship(f"o-{n}")
    assert (await reconcile(unshipped(), queued, ship, grace=60)).clean

    with own_redis.client() as server:  # what a restore from an old snapshot does: 40 jobs are not there
        for n in range(40):
            assert server.delete(queue.toKey(job_id("ship", f"o-{n}")))
            server.lrem(queue.toKey("wait"), 0, job_id("ship", f"o-{n}"))
    lost_without_it = 100 - await queue.getJobCountByTypes("waiting")
    assert lost_without_it == 40  # and nothing in the queue would ever bring them back

    report = await reconcile(unshipped(), queued, ship, grace=60)
    assert sorted(report.repaired) == sorted(f"o-{n}" for n in range(40))
    assert (report.young, report.failed) == (1, {})
    waiting = await queue.getJobCountByTypes("waiting")
    assert waiting == len(rows)
    assert (await reconcile(unshipped(), queued, ship, grace=60)).clean
    figures(
        "reconciliation",
        name=f"lost-jobs-{store.dialect.name}",
        orders=len(rows),
        lost=lost_without_it,
        repaired=len(report.repaired),
        duplicated=waiting - len(rows),
        still_lost_without_it=lost_without_it,
    )
    await client.aclose()

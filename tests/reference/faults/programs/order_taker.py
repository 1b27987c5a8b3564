"""Takes one order and dies between its commit and the queue. --naive: the job is only added after the commit."""

import argparse
import asyncio
import os
import signal

from pending_orders import job_types, orders, prepare

from harness.pipelines import full_producer
from studyhall.patterns.core.open_store import open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.degraded import DegradedProducer


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--order", required=True)
    parser.add_argument("--naive", action="store_true")
    options = parser.parse_args()
    producer, store = full_producer(job_types(), options.redis), open_store(options.store)
    degraded, request = DegradedProducer(producer, store), prepare(options.order)
    await degraded.admit(request)
    async with begin(store) as tx:
        await tx.execute(orders.insert().values(id=options.order))
        if not options.naive:
            await degraded.accept(tx, request)
    os.kill(os.getpid(), signal.SIGKILL)
    await degraded.hand_over(request)


asyncio.run(main())

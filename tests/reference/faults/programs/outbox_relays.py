"""Relays that a proof kills: the pattern, and what people write instead.

    outbox_relays.py MODE STORE_URL REDIS_URL WORKER_ID

Everything published goes to the Redis stream `sink`, without any dedup, so that copies can be counted.
"""

import asyncio
import os
import signal
import sys
import time

from sqlalchemy import select, update

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.outbox import outbox
from studyhall.patterns.outbox.relay import Relay

BATCH = 20


class Sink:
    """A broker that takes milliseconds, so that a kill lands in mid-batch."""

    def __init__(self, redis, worker):
        self._redis, self._worker = redis, worker
        self._pause = float(os.environ.get("PUBLISH_SECONDS", "0.002"))

    async def publish(self, events):
        for event in events:
            await self._redis.xadd("sink", {"id": event.id, "by": self._worker, "body": event.encode()})
            await asyncio.sleep(self._pause)
        return [None] * len(events)


async def relay(store, redis, worker):
    engine, lease = open_store(store), float(os.environ.get("LEASE_SECONDS", "30"))
    running = Relay(engine, Sink(redis, worker), worker_id=worker, batch=BATCH, lease=lease, poll=0.1)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.stop)
    await running.run()


async def select_then_update(store, redis, worker):
    """Naive: read the unpublished rows, publish them, mark them. Two of these duplicate everything."""
    sink, engine = Sink(redis, worker), open_store(store)
    oldest = select(outbox.c.position, outbox.c.body).where(outbox.c.published_at.is_(None))
    while True:
        async with read(engine) as connection:
            rows = (await connection.execute(oldest.order_by(outbox.c.position).limit(BATCH))).all()
        if not rows:
            return
        await sink.publish([Event.decode(row.body) for row in rows])
        async with begin(engine) as tx:
            done = update(outbox).where(outbox.c.position.in_([row.position for row in rows]))
            await tx.execute(done.values(published_at=time.time()))


async def mark_first(store, redis, worker):
    """Naive: mark before publishing, so that nothing is duplicated. A kill in between loses the batch."""
    sink, engine = Sink(redis, worker), open_store(store)
    oldest = select(outbox.c.position).where(outbox.c.published_at.is_(None)).order_by(outbox.c.position)
    while True:
        async with begin(engine) as tx:
            marked = update(outbox).where(outbox.c.position.in_(oldest.limit(BATCH)))
            rows = await tx.execute(marked.values(published_at=time.time()).returning(outbox.c.body))
            bodies = rows.scalars().all()
        await sink.publish([Event.decode(body) for body in bodies])
        if not bodies:
            await asyncio.sleep(0.02)


async def main(mode, store, redis_url, worker):
    redis = producer_client(redis_url)
    await redis.sadd(f"ready:{mode}", worker)
    while not await redis.exists(f"go:{mode}"):
        await asyncio.sleep(0.01)
    modes = {f.__name__: f for f in (relay, select_then_update, mark_first)}
    await modes[mode](store, redis, worker)
    await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Consumers that die at a chosen point: with the inbox, and with a marker in Redis instead.

    inbox_consumers.py MODE STORE_URL REDIS_URL DIE_AT

Dies by SIGKILL the first time an event reaches DIE_AT: `before` its effect is committed, or right `after`.
"""

import asyncio
import os
import signal
import sys

from sqlalchemy import Column, Integer, String, Table, insert

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import open_store
from studyhall.patterns.core.store import begin, metadata
from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus
from studyhall.patterns.inbox import handle_once

effects = Table(
    "proof_inbox_effects",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("mode", String, nullable=False),
    Column("event", String, nullable=False),
)


def consumer(mode, store, redis, die_at):
    async def effect(tx, event):
        await tx.execute(insert(effects).values(mode=mode, event=event.id))

    async def die(at):
        if at == die_at and await redis.set(f"died:{mode}:{at}", 1, nx=True):
            os.kill(os.getpid(), signal.SIGKILL)

    async def with_inbox(event):
        async def once(tx, event):
            await effect(tx, event)
            await die("before")

        await handle_once(store, "payouts", event, once)
        await die("after")

    async def mark_first(event):
        """Naive: SET NX, then the effect. Whoever dies in between never pays."""
        if not await redis.set(f"seen:{mode}:{event.id}", 1, nx=True):
            return
        await die("before")
        async with begin(store) as tx:
            await effect(tx, event)
        await die("after")

    async def mark_last(event):
        """Naive: the effect, then the mark. Whoever dies in between pays twice."""
        if await redis.exists(f"seen:{mode}:{event.id}"):
            return
        await die("before")
        async with begin(store) as tx:
            await effect(tx, event)
        await die("after")
        await redis.set(f"seen:{mode}:{event.id}", 1)

    return {"with_inbox": with_inbox, "mark_first": mark_first, "mark_last": mark_last}[mode]


async def main(mode, store, redis_url, die_at):
    redis, stop = producer_client(redis_url), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    bus = RedisStreamsBus(redis, member="the-only-one", claim_idle=0.5)
    handler = consumer(mode, open_store(store), redis, die_at)
    await bus.consume(mode, ["order"], handler, stop=stop, concurrency=4)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

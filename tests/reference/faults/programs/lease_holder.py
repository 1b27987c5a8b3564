"""Holds a lease (or a naive lock) and writes its name, when the test says so: the test freezes it in between."""

import argparse
import asyncio
import json
import sys

from sqlalchemy import Column, Integer, String, Table, insert

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, metadata
from studyhall.patterns.lease import Lease, StaleFence, check_fence

writes = Table("writes", metadata, Column("id", Integer, primary_key=True), Column("who", String(20), nullable=False))


def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)


async def wait_for_go(redis, who):
    """Until the test says `go`. A thread-free spin on purpose: nothing here notices a lost lease by itself."""
    while not await redis.get(f"go:{who}"):
        await asyncio.sleep(0.02)


async def fenced(args, redis, store):
    async with Lease(redis, "report", ttl=args.ttl, wait=20) as held:
        say("held", fence=held.fence)
        await wait_for_go(redis, args.who)
        try:
            async with begin(store) as tx:
                await check_fence(tx, "report", held.fence)
                await tx.execute(insert(writes).values(who=args.who))
            say("written")
        except StaleFence as error:
            say("refused", why=str(error))
        await held.lost.wait() if args.await_loss else None
        say("left", lost=held.lost.is_set())


async def naive(args, redis, store):
    """What is usually published: SET NX with a time to live, DEL at the end."""
    while not await redis.set("lock", args.who, nx=True, px=int(args.ttl * 1000)):
        await asyncio.sleep(0.02)
    say("held")
    await wait_for_go(redis, args.who)
    async with begin(store) as tx:
        await tx.execute(insert(writes).values(who=args.who))
    say("written")
    await redis.delete("lock")
    say("left")


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["fenced", "naive"])
    parser.add_argument("who")
    parser.add_argument("--redis", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--ttl", type=float, default=0.6)
    parser.add_argument("--await-loss", action="store_true")
    args = parser.parse_args()
    redis, store = producer_client(args.redis), open_store(args.store)
    await create_all(store)
    await (fenced if args.kind == "fenced" else naive)(args, redis, store)
    await redis.aclose()
    await close(store)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

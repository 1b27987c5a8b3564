"""Consumers with at-least-once delivery that are killed all the time.

Arguments: store URL, Redis URL, kills, seed. For each way of being idempotent, events wait in the Redis list
`<way>:events`; a consumer moves one to its own list, handles it, removes it. What a dead consumer had in
its list is delivered again. Prints `deaths {way: {point: number}}` when all events are handled.
"""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import nursery
from sqlalchemy import Column, Integer, Table, Text, insert

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import begin, metadata
from studyhall.patterns.idempotency import Inbox, fingerprint

POINTS = ["taken", "in the effect", "effect done"]
WAYS = ["inbox", "set-nx", "set-nx-del"]

emails = Table(
    "victim_emails",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("way", Text, nullable=False),
    Column("key", Text, nullable=False),
    extend_existing=True,
)

Event = dict[str, Any]


async def send_email(tx, event, life):
    """The effect. Some events meet an error on their first delivery."""
    await tx.execute(insert(emails).values(way=event["way"], key=event["key"]))
    await asyncio.sleep(0.001)
    life.reached("in the effect")
    if event.get("error") == "early" and event["delivery"] == 1:
        raise ConnectionError("mail server is down")


def with_inbox(store, life):
    inbox = Inbox(store, "emails")

    async def handle(event):
        async def effect(tx):
            await send_email(tx, event, life)
            return f"sent to {event['key']}"

        result = await inbox.once(event["key"], fingerprint(event["key"]), effect)
        assert result == f"sent to {event['key']}"

    return handle


def with_set_nx(store, life, redis, *, delete):
    """The naive twins: the marker is in another store than the effect."""

    async def handle(event):
        if not await redis.set(f"{event['way']}:done:{event['key']}", 1, nx=True):
            return
        try:
            async with begin(store) as tx:
                await send_email(tx, event, life)
            late(event)
        except Exception:
            if delete:
                await redis.delete(f"{event['way']}:done:{event['key']}")
            raise

    return handle


def late(event):
    """The effect happened, but its caller is told that it failed: a timeout on the answer."""
    if event.get("error") == "late" and event["delivery"] == 1:
        raise TimeoutError("no answer from the mail server")


async def consume(life, store_url, redis_url, way):
    redis, store = producer_client(redis_url), open_store(store_url)
    events, taken = f"{way}:events", f"{way}:taken-by:{life.slot}"
    while await redis.lmove(taken, events, "LEFT", "RIGHT"):
        pass  # what my predecessor had taken is delivered again
    naive = partial(with_set_nx, delete=way == "set-nx-del")
    handle = with_inbox(store, life) if way == "inbox" else naive(store, life, redis)
    while raw := await redis.lmove(events, taken, "LEFT", "RIGHT"):
        life.reached("taken")
        event = {**json.loads(raw), "delivery": await redis.hincrby(f"{way}:deliveries", raw, 1)}
        try:
            await handle(event)
            if way == "inbox":
                late(event)
        except (ConnectionError, TimeoutError):
            await redis.rpush(events, raw)  # deliver it again
        life.reached("effect done")
        await redis.lrem(taken, 1, raw)
    await close(store)
    await redis.aclose()


def main(store_url, redis_url, kills, seed):
    deaths = {}
    for way in WAYS:
        live = partial(consume, store_url=store_url, redis_url=redis_url, way=way)
        deaths[way] = nursery.run(live, points=POINTS, kills=kills, seed=seed, slots=3)
    print("deaths", json.dumps(deaths))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

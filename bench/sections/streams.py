"""Events per second of one consumer process on Redis Streams: ours beside FastStream."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from redis.asyncio import Redis

from bench.figures import Column, Value
from bench.lab import Lab
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.event import Event
from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus

TITLE = "Stream consumers"
ABOUT = (
    "The stream is filled beforehand and the handler does nothing; the clock runs until every entry is acknowledged, "
    "so nobody gains by acknowledging late. 100 events at a time. Both decode and validate the event; ours takes over "
    "from dead consumers and quarantines, FastStream acknowledges after the handler and has neither. `publish` is in "
    "batches of 500, repeated ids dropped."
)
COLUMNS = {"consume": Column("consume", "events/s"), "publish": Column("publish", "events/s")}
CONCURRENCY = 100

Contest = Callable[[str, int], Coroutine[Any, Any, dict[str, Value]]]


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    logging.getLogger("faststream").setLevel("ERROR")
    events = lab.scale(4_000, 20_000)
    rows: dict[str, dict[str, Value]] = {}
    for name, contest in CONTESTANTS.items():
        with lab.server.client() as client:
            client.flushall()
        rows[name] = asyncio.run(contest(lab.url, events))
        lab.say(f"{name}: {rows[name]['consume']:,} events/s")
    return rows


def event(number: int) -> Event:
    return Event(source="/bench", type="order.placed.v1", subject=f"order-{number % 1000}", data={"total": number})


async def acknowledged(redis: Redis, stream: str, group: str) -> None:
    while True:
        (info,) = await redis.xinfo_groups(stream)
        if info["pending"] == 0 and info["lag"] == 0:
            return
        await asyncio.sleep(0.01)


async def ours(url: str, count: int, *, ordered: bool = False) -> dict[str, Value]:
    redis = producer_client(url)
    bus = RedisStreamsBus(redis, ordered=ordered)
    await bus.subscribe("bench", ["order"])
    batch = [event(number) for number in range(count)]
    began = time.perf_counter()
    for start in range(0, count, 500):
        assert set(await bus.publish(batch[start : start + 500])) == {None}
    published = time.perf_counter() - began
    handled = 0

    async def nothing(_: Event) -> None:
        nonlocal handled
        handled += 1

    stop = asyncio.Event()
    began = time.perf_counter()
    consumer = asyncio.create_task(bus.consume("bench", ["order"], nothing, stop=stop, concurrency=CONCURRENCY))
    await acknowledged(redis, "events:order:0", "bench")
    seconds = time.perf_counter() - began
    stop.set()
    await consumer
    assert handled == count, f"{handled} of {count}"
    await redis.aclose()
    return {"consume": round(count / seconds), "publish": round(count / published)}


async def faststream(url: str, count: int) -> dict[str, Value]:
    from faststream.redis import RedisBroker, StreamSub

    silent: Any = None  # logs nothing; its signature allows only loggers
    redis = Redis.from_url(url)
    # one message in its own format, copied: filling one by one would take longer than the race
    async with RedisBroker(url, logger=silent) as broker:
        await broker.start()
        await broker.publish(event(0), stream="bench")
    entries: Any = await redis.xrange("bench")
    ((_, fields),) = entries
    for start in range(1, count, 1000):
        async with redis.pipeline(transaction=False) as pipe:
            for _ in range(start, min(start + 1000, count)):
                pipe.xadd("bench", fields)
            await pipe.execute()
    await redis.xgroup_create("bench", "bench", id="0")  # FastStream would start at the end and see nothing
    handled = 0
    broker = RedisBroker(url, logger=silent)

    @broker.subscriber(
        stream=StreamSub("bench", group="bench", consumer="one", max_records=CONCURRENCY, polling_interval=50)
    )
    async def nothing(_: Event) -> None:
        nonlocal handled
        handled += 1

    began = time.perf_counter()
    await broker.start()
    await acknowledged(redis, "bench", "bench")
    seconds = time.perf_counter() - began
    await broker.stop()
    assert handled == count, f"{handled} of {count}"
    await redis.aclose()
    return {"consume": round(count / seconds), "publish": None}


CONTESTANTS: dict[str, Contest] = {
    "Queuesmith": ours,
    "Queuesmith, ordered": partial(ours, ordered=True),
    "FastStream": faststream,
}

"""Events per second of one consumer process on Redis Streams: ours beside FastStream, same Redis, same run.

    .venv/bin/python bench/event_bus.py [--events 20000] [--rounds 3] [--concurrency 100] [--uvloop] [--json FILE]

The stream is filled beforehand and the handler does nothing. The clock runs until every entry is acknowledged
(none pending, none unread), so nobody gains by acknowledging late. Contestants take turns, medians are compared.
Both decode and validate the event; ours is at-least-once with takeover and quarantine, FastStream acknowledges
after the handler but has neither. `publish` is ours too: batches of 500 with the drop of repeated ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "reference"), str(ROOT / "tests")]

from faststream.redis import RedisBroker, StreamSub  # noqa: E402
from redis.asyncio import Redis  # noqa: E402

from harness.redis import RedisServer  # noqa: E402
from studyhall.patterns.bus_redis_streams import RedisStreamsBus  # noqa: E402
from studyhall.patterns.connections import producer_client  # noqa: E402
from studyhall.patterns.event_schema import Event  # noqa: E402

TARGET = 5_000
Contest = Callable[[str, int, int], Awaitable[dict[str, float]]]


def event(number: int) -> Event:
    return Event(
        source="/bench", type="order.placed.v1", subject=f"order-{number % 1000}", data={"total": number}
    )


async def acknowledged(redis: Redis, stream: str, group: str) -> None:
    while True:
        (info,) = await redis.xinfo_groups(stream)
        if info["pending"] == 0 and info["lag"] == 0:
            return
        await asyncio.sleep(0.01)


async def ours(url: str, count: int, concurrency: int, *, ordered: bool = False) -> dict[str, float]:
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
    consumer = asyncio.create_task(
        bus.consume("bench", ["order"], nothing, stop=stop, concurrency=concurrency)
    )
    await acknowledged(redis, "events:order:0", "bench")
    seconds = time.perf_counter() - began
    stop.set()
    await consumer
    assert handled == count, f"{handled} of {count}"
    await redis.aclose()
    return {"consume": count / seconds, "publish": count / published}


async def ours_ordered(url: str, count: int, concurrency: int) -> dict[str, float]:
    return await ours(url, count, concurrency, ordered=True)


async def faststream(url: str, count: int, concurrency: int) -> dict[str, float]:
    redis = Redis.from_url(url)
    broker = RedisBroker(url, logger=None)
    async with (
        broker
    ):  # one message in its own format, copied: filling one by one would take longer than the race
        await broker.start()
        await broker.publish(event(0), stream="bench")
    ((_, fields),) = await redis.xrange("bench")
    for start in range(1, count, 1000):
        async with redis.pipeline(transaction=False) as pipe:
            for _ in range(start, min(start + 1000, count)):
                pipe.xadd("bench", fields)
            await pipe.execute()
    await redis.xgroup_create("bench", "bench", id="0")  # FastStream would start at the end and see nothing
    handled = 0
    broker = RedisBroker(url, logger=None)

    @broker.subscriber(
        stream=StreamSub("bench", group="bench", consumer="one", max_records=concurrency, polling_interval=50)
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
    return {"consume": count / seconds}


CONTESTANTS: dict[str, Contest] = {"ours": ours, "ours, ordered": ours_ordered, "faststream": faststream}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    run: Callable[..., Any] = asyncio.run
    if options.uvloop:
        import uvloop

        run = uvloop.run
    server = RedisServer.start()
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in CONTESTANTS}
    try:
        for _ in range(options.rounds):
            for name, contest in CONTESTANTS.items():
                with server.client() as client:
                    client.flushall()
                for what, rate in run(contest(server.url, options.events, options.concurrency)).items():
                    rates[name].setdefault(what, []).append(rate)
    finally:
        server.stop()
    result = {
        "events": options.events,
        "rounds": options.rounds,
        "concurrency": options.concurrency,
        "uvloop": options.uvloop,
        "target": TARGET,
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("redis", "faststream")}},
        "per_second": {
            name: {
                what: {
                    "median": round(statistics.median(all_)),
                    "min": round(min(all_)),
                    "max": round(max(all_)),
                }
                for what, all_ in measured.items()
            }
            for name, measured in rates.items()
        },
    }
    print(f"{'events per second':<18}{'consume':>10}{'min':>8}{'max':>8}{'publish':>10}")
    for name, measured in result["per_second"].items():  # type: ignore[attr-defined]
        consume, publish = measured["consume"], measured.get("publish", {}).get("median", "")
        print(f"{name:<18}{consume['median']:>10}{consume['min']:>8}{consume['max']:>8}{publish:>10}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The outbox relay in numbers, on SQLite and on PostgreSQL, publishing into a real Redis stream.

    .venv/bin/python bench/outbox_relay.py [--events 20000] [--orders 500] [--rows 1000000] [--json FILE]

rate     events per second of one relay that empties a backlog (claim → publish → settle, batches of 500)
latency  milliseconds from the commit to the durable acceptance by the stream, at 50 orders per second
claim    milliseconds of one claim of up to 100 rows while `--rows` published ones are in the table, beside the
         same search without the partial index
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "reference"), str(ROOT / "tests")]

from redis.asyncio import Redis  # noqa: E402
from sqlalchemy import insert, text  # noqa: E402
from sqlalchemy.ext.asyncio import AsyncEngine  # noqa: E402

from harness.postgres import PostgresServer  # noqa: E402
from harness.redis import RedisServer  # noqa: E402
from studyhall.patterns.connections import producer_client  # noqa: E402
from studyhall.patterns.event_schema import Event  # noqa: E402
from studyhall.patterns.outbox import add, claim, outbox, settle  # noqa: E402
from studyhall.patterns.outbox_relay import Relay  # noqa: E402
from studyhall.patterns.store import begin, close, create_all, is_postgres, open_store, read  # noqa: E402

TARGETS = {"rate": 2000, "latency_p95": 250.0, "claim_p50": 2.0}


FILL = """
INSERT INTO outbox (destination, event_id, subject, type, body, created_at, due_at, attempts, published_at)
SELECT 'bus', 'old-' || n, 'o-' || (n % 1000), 'order.placed.v1', '{}', n, 0, 0, n FROM
"""
FILL_POSTGRES = FILL + "generate_series(1, :rows) AS numbers(n)"
FILL_SQLITE = FILL + (  # noqa: S608
    "(WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < :rows) SELECT n FROM g)"
)
# What a relay without the partial index does: the expressions keep the planner from using ours.
SEARCH_POSTGRES = "SELECT body FROM outbox WHERE coalesce(published_at, 0) = 0 ORDER BY position LIMIT 100"
SEARCH_SQLITE = "SELECT body FROM outbox WHERE +published_at IS NULL ORDER BY position LIMIT 100"


class Stream:
    """One pipelined XADD per event; accepted when Redis answered."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.at: dict[str, float] = {}

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        pipe = self._redis.pipeline(transaction=False)
        for event in events:
            pipe.xadd("sink", {"id": event.id, "body": event.encode()})
        await pipe.execute()
        now = time.perf_counter()
        self.at.update((event.id, now) for event in events)
        return [None] * len(events)


def event(n: int, subjects: int) -> Event:
    return Event(
        id=f"e-{n}", source="/bench", type="order.placed.v1", subject=f"o-{n % subjects}", data={"n": n}
    )


async def rate(store: AsyncEngine, redis: Redis, count: int) -> float:
    rows = [
        {
            "destination": "bus",
            "event_id": e.id,
            "subject": e.subject,
            "type": e.type,
            "body": e.encode().decode(),
        }
        | {"created_at": 0.0, "due_at": 0.0, "attempts": 0}
        for e in (event(n, 1000) for n in range(count))
    ]
    async with begin(store) as tx:
        await tx.execute(insert(outbox), rows)
    relay = Relay(store, Stream(redis))
    begun = time.perf_counter()
    while await relay.run_once():
        pass
    seconds = time.perf_counter() - begun
    assert await redis.xlen("sink") == count, "lost or doubled"
    return count / seconds


async def latency(store: AsyncEngine, redis: Redis, orders: int) -> list[float]:
    stream, committed = Stream(redis), {}
    relay = Relay(store, stream)
    running = asyncio.create_task(relay.run())
    begun = time.perf_counter()
    for n in range(orders):
        await asyncio.sleep(max(0.0, begun + n / 50 - time.perf_counter()))
        placed = event(n, orders).model_copy(update={"id": f"late-{n}"})
        async with begin(store) as tx:
            await add(tx, placed)
        committed[placed.id] = time.perf_counter()
    while len(stream.at) < orders:
        await asyncio.sleep(0.01)
    relay.stop()
    await running
    return sorted(max(0.0, stream.at[ident] - at) * 1000 for ident, at in committed.items())


async def claims(store: AsyncEngine, rows: int) -> tuple[list[float], list[float]]:
    async with begin(store) as tx:
        await tx.execute(text(FILL_POSTGRES if is_postgres(store) else FILL_SQLITE), {"rows": rows})
    if is_postgres(store):
        async with store.connect() as connection:
            plain = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await plain.execute(text("VACUUM ANALYZE outbox"))
    search = text(SEARCH_POSTGRES if is_postgres(store) else SEARCH_SQLITE)
    ours, naive = [], []
    for n in range(60):
        async with begin(store) as tx:
            await add(tx, *(event(n * 10 + m, 10).model_copy(update={"id": f"c-{n}-{m}"}) for m in range(10)))
        if n % 6 == 0:
            async with read(store) as connection:
                begun = time.perf_counter()
                (await connection.execute(search)).all()
                naive.append((time.perf_counter() - begun) * 1000)
        begun = time.perf_counter()
        found = await claim(store, "bench", 100, 30)
        ours.append((time.perf_counter() - begun) * 1000)
        assert len(found) == 10
        await settle(store, "bench", published=[row.position for row in found])
    return sorted(ours), sorted(naive)


async def measure(url: str, redis_url: str, options: argparse.Namespace) -> dict[str, float]:
    store, redis = open_store(url), producer_client(redis_url)
    await redis.flushall()
    await create_all(store)
    per_second = await rate(store, redis, options.events)
    delays = await latency(store, redis, options.orders)
    ours, naive = await claims(store, options.rows)
    await close(store)
    await redis.aclose()
    return {
        "rate": round(per_second),
        "latency_p50": round(statistics.median(delays), 1),
        "latency_p95": round(delays[int(len(delays) * 0.95)], 1),
        "claim_p50": round(statistics.median(ours), 2),
        "claim_p95": round(ours[int(len(ours) * 0.95)], 2),
        "search_without_index_p50": round(statistics.median(naive), 2),
    }


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--orders", type=int, default=500)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    redis, postgres = RedisServer.start(), PostgresServer.start()
    try:
        with tempfile.TemporaryDirectory() as directory:
            results: dict[str, Any] = {
                "sqlite": await measure(f"sqlite:///{directory}/bench.db", redis.url, options),
                "postgresql": await measure(postgres.url, redis.url, options),
            }
    finally:
        postgres.stop()
        redis.stop()
    print(f"{'':26}{'sqlite':>12}{'postgresql':>12}{'target':>10}")
    for name in results["sqlite"]:
        target = TARGETS.get(name, "")
        print(f"{name:26}{results['sqlite'][name]:>12}{results['postgresql'][name]:>12}{target:>10}")
    if options.json:
        sizes = {"published_rows": options.rows, "events": options.events, "orders": options.orders}
        report = {**sizes, "load_average": os.getloadavg()[0], **results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    met = all(
        r["rate"] >= TARGETS["rate"]
        and r["latency_p95"] < TARGETS["latency_p95"]
        and r["claim_p50"] < TARGETS["claim_p50"]
        for r in results.values()
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

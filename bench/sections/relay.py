"""The outbox relay on SQLite and on PostgreSQL, publishing into a real Redis stream."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence

from redis.asyncio import Redis
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from bench.figures import Column, Value, less, percentile
from bench.lab import Lab
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, is_postgres, read
from studyhall.patterns.outbox import add, outbox
from studyhall.patterns.outbox.claims import claim, settle
from studyhall.patterns.outbox.relay import Relay

from .stores import on_both

TITLE = "Outbox relay"
ABOUT = (
    "Rate: one relay empties a backlog (claim, publish, settle, 500 at a time). Latency: from the commit to the "
    "stream's acceptance, at 50 orders per second. Claim: one claim of up to 100 rows while published ones are "
    "still in the table (full runs: a million, quick: 100,000), beside the same search without the partial index."
)
COLUMNS = {
    "rate": Column("rate", "events/s"),
    "latency_p50": less("latency p50", "ms"),
    "latency_p95": less("p95", "ms"),
    "claim_p50": less("claim p50", "ms"),
    "claim_p95": less("p95", "ms"),
    "search_p50": less("without the index p50", "ms"),
}

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
    return Event(id=f"e-{n}", source="/bench", type="order.placed.v1", subject=f"o-{n % subjects}", data={"n": n})


async def rate(store: AsyncEngine, redis: Redis, count: int) -> float:
    rows = [
        {"destination": "bus", "event_id": e.id, "subject": e.subject, "type": e.type, "body": e.encode().decode()}
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
    assert await redis.xlen("sink") == count, "lost or duplicated"
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
    return [max(0.0, stream.at[ident] - at) * 1000 for ident, at in committed.items()]


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
        claimed = await claim(store, "bench", 100, 30)
        ours.append((time.perf_counter() - begun) * 1000)
        assert len(claimed) == 10
        await settle(store, "bench", published=[row.position for row in claimed])
    return ours, naive


async def once(url: str, redis_url: str, *, events: int, orders: int, rows: int) -> dict[str, Value]:
    store, redis = open_store(url), producer_client(redis_url)
    await redis.flushall()
    await create_all(store)
    per_second = await rate(store, redis, events)
    delays = await latency(store, redis, orders)
    ours, naive = await claims(store, rows)
    await close(store)
    await redis.aclose()
    return {
        "rate": round(per_second),
        "latency_p50": round(statistics.median(delays), 1),
        "latency_p95": round(percentile(delays, 95), 1),
        "claim_p50": round(statistics.median(ours), 2),
        "claim_p95": round(percentile(ours, 95), 2),
        "search_p50": round(statistics.median(naive), 2),
    }


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    size = lab.scale(
        {"events": 4_000, "orders": 100, "rows": 100_000}, {"events": 20_000, "orders": 500, "rows": 1_000_000}
    )
    with tempfile.TemporaryDirectory() as folder:
        sqlite = asyncio.run(once(f"sqlite:///{folder}/bench.db", lab.url, **size))
    return on_both(
        lab,
        sqlite,
        lambda postgres: asyncio.run(once(postgres.url, lab.url, **size)),
        lambda row: f"{row['rate']:,} events/s",
    )

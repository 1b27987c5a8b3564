"""Lists a state of 100,000 jobs without holding Redis up: no command takes more than a page. One call for all delayed
jobs blocks Redis.

When it does NOT hold: it pages by rank, so a job that ends while you read can hide its neighbour until you list again.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

__all__ = ["JobSummary", "pages"]

LISTS = frozenset({"wait", "paused", "active"})
SETS = frozenset({"prioritized", "delayed", "completed", "failed", "waiting-children"})


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job without its payload."""

    id: str
    name: str
    added: float  # seconds since 1970
    due: float | None  # of a delayed job
    attempts: int
    reason: str | None  # of a failed one


async def pages(
    redis: Redis, queue: str, state: str, *, size: int = 200, prefix: str = "bull"
) -> AsyncIterator[list[JobSummary]]:
    """The jobs of one state, next to be served first, page by page. Stop whenever you have seen enough."""
    if state not in LISTS | SETS or not 1 <= size <= 1_000:
        known = ", ".join(sorted(LISTS | SETS))
        raise ValueError(f"state {state!r} is not one of {known}, or the page is not 1 to 1,000 jobs")
    client: Any = redis
    base = f"{prefix}:{queue}:"
    start = 0
    while True:
        if state in LISTS:  # newest first in Redis: read from the tail
            ids = [(job, 0.0) for job in await client.lrange(base + state, -start - size, -start - 1)][::-1]
        else:
            ids = await client.zrange(base + state, start, start + size - 1, withscores=True)
        if not ids:
            return
        async with client.pipeline(transaction=False) as batch:
            for job, _ in ids:
                batch.hmget(base + job, "name", "timestamp", "atm", "failedReason")
            fields = await batch.execute()
        yield [
            JobSummary(
                job,
                name or "",
                float(added or 0) / 1000,
                score // 0x1000 / 1000 if state == "delayed" else None,
                int(attempts or 0),
                reason,
            )
            for (job, score), (name, added, attempts, reason) in zip(ids, fields, strict=True)
        ]
        start += len(ids)

"""Outbox upkeep: how far behind the relay is, what it gave up on, and when published rows are purged.

Promise: `lag` reads only unpublished rows; a quarantined event leaves the quarantine by `requeue`
(published in its old place, before the events it held back) or by `discard` (never published, kept until
purge), nothing else; `purge` deletes in short transactions and never touches what was not published.

When it does NOT hold: replay reads these rows, so what is purged can no longer be replayed.
Requeueing under `hold=False` publishes the event after its successors: its order was given up when it was
skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.failures import clean_text
from ..core.store import begin, is_postgres, read
from .table import BUS, MAX_REASON, NEVER, clock, outbox, unpublished

__all__ = ["Lag", "QuarantinedRow", "destinations", "discard", "lag", "purge", "quarantined", "requeue"]

_quarantined = (unpublished, outbox.c.due_at == NEVER)


@dataclass(frozen=True, slots=True)
class Lag:
    waiting: int  # committed and neither published nor quarantined
    oldest: float  # age in seconds of the oldest of them: alert on this, not on the count
    quarantined: int


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    position: int
    event_id: str
    subject: str
    type: str
    attempts: int
    reason: str
    held: int  # later events of the subject that wait behind it


async def lag(store: AsyncEngine, *, destination: str = BUS) -> Lag:
    given_up = outbox.c.due_at == NEVER
    age = clock(is_postgres(store)) - func.min(outbox.c.created_at).filter(~given_up)
    counts = (func.count().filter(~given_up), age, func.count().filter(given_up))
    async with read(store) as connection:
        result = await connection.execute(select(*counts).where(unpublished, outbox.c.destination == destination))
        waiting, oldest, given = result.one()
    return Lag(waiting, max(oldest or 0.0, 0.0), given)


async def destinations(store: AsyncEngine) -> list[str]:
    """Those with rows here."""
    async with read(store) as connection:
        return sorted(await connection.scalars(select(outbox.c.destination).distinct()))


async def quarantined(store: AsyncEngine, *, destination: str = BUS, limit: int = 100) -> list[QuarantinedRow]:
    """Oldest first."""
    row, later = outbox.c, outbox.alias("later")
    behind = (
        select(func.count())
        .where(later.c.published_at.is_(None), later.c.destination == row.destination)
        .where(later.c.subject == row.subject, later.c.position > row.position)
        .scalar_subquery()
    )
    columns = (row.position, row.event_id, row.subject, row.type, row.attempts, row.reason, behind)
    wanted = select(*columns).where(*_quarantined, row.destination == destination)
    async with read(store) as connection:
        result = await connection.execute(wanted.order_by(row.position).limit(limit))
        return [QuarantinedRow(*columns) for columns in result.all()]


async def requeue(store: AsyncEngine, event_ids: Sequence[str], *, destination: str = BUS) -> int:
    """Fresh attempts for quarantined events. Returns how many there were; other ids are left alone."""
    fresh: dict[str, object] = {"due_at": 0.0, "attempts": 0, "reason": None}
    return await _release(store, event_ids, destination, fresh)


async def discard(store: AsyncEngine, event_ids: Sequence[str], why: str, *, destination: str = BUS) -> int:
    """Give up quarantined events for good, so that those behind them go on."""
    gone = {
        "due_at": 0.0,
        "published_at": clock(is_postgres(store)),
        "reason": clean_text(f"discarded: {why}", MAX_REASON),
    }
    return await _release(store, event_ids, destination, gone)


async def purge(store: AsyncEngine, older_than: float, *, batch: int = 1000) -> int:
    """Delete up to `batch` rows published more than `older_than` seconds ago. Call again until it returns less."""
    # Looks at the oldest published positions only: a search by date would scan the table to find nothing.
    first = select(outbox.c.position, outbox.c.published_at).where(~unpublished)
    oldest = first.order_by(outbox.c.position).limit(batch).subquery()
    due = select(oldest.c.position).where(oldest.c.published_at < clock(is_postgres(store)) - older_than)
    async with begin(store) as tx:
        return (await tx.execute(delete(outbox).where(outbox.c.position.in_(due)))).rowcount


async def _release(store: AsyncEngine, event_ids: Sequence[str], destination: str, values: dict[str, object]) -> int:
    chosen = (outbox.c.event_id.in_(event_ids), outbox.c.destination == destination, *_quarantined)
    async with begin(store) as tx:
        return (await tx.execute(update(outbox).where(*chosen).values(**values))).rowcount

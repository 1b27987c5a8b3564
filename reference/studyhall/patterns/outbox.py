"""Outbox: the event is a row in the transaction that made it true; a relay publishes it afterwards.

Promise: what commits is published, what rolls back never is, and nothing is visible before the commit.
Events with one subject (aggregate key) reach the bus in commit order, whatever number of relays run and
whichever of them dies; subjects do not wait for each other. The event's id is its publish id, so repeats
can be dropped.

When it does NOT hold
- Delivery is at least once: what a relay had published but not marked when it was killed, or stalled past its
  lease, is published again (same ids, first copies still in order). Consumers need the inbox.
- A quarantined event holds back the later events of its subject until somebody requeues or discards it
  (`hold=True`, the default: `order.paid` without its `order.placed` misleads every consumer). With
  `hold=False` the later ones go on, and the order of that subject has a hole.
- `add` locks its subjects until commit (PostgreSQL), so that commit order and position agree. Transactions
  that call `add` twice for the same subjects in opposite order deadlock; one `add` with all events sorts
  them.
- The same id may be added again after its row was purged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    String,
    Table,
    Text,
    bindparam,
    cast,
    exists,
    extract,
    func,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.elements import ColumnElement

from .event_schema import Event
from .store import in_one_hop, is_postgres, metadata

__all__ = ["BUS", "CHANNEL", "Claimed", "Failure", "add", "claim", "clock", "outbox", "settle"]

BUS = "bus"  # the default destination; fan-out adds one row per queue
CHANNEL = "outbox"  # PostgreSQL NOTIFY channel, payload: the destination
NEVER = float("inf")

outbox = Table(
    "outbox",
    metadata,
    Column("position", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("destination", String(100), nullable=False),
    Column("event_id", String(200), nullable=False),
    Column("subject", String(300), nullable=False),
    Column("type", String(200), nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),  # end of the lease or of the backoff; infinity: quarantined
    Column("claimed_by", String(100)),
    Column("attempts", Integer, nullable=False, default=0),
    Column("published_at", Double),
    Column("reason", Text),  # of the last failure
    sqlite_autoincrement=True,  # or SQLite hands out the positions of purged rows again
)
_unpublished = outbox.c.published_at.is_(None)
Index("outbox_event", outbox.c.event_id, outbox.c.destination, unique=True)
# Partial: they hold only what still has to be published, so a million published rows cost a claim nothing.
for _name, _columns in {
    "outbox_in_order": (outbox.c.destination, outbox.c.position),
    "outbox_by_due_time": (outbox.c.destination, outbox.c.due_at, outbox.c.subject),
}.items():
    Index(_name, *_columns, postgresql_where=_unpublished, sqlite_where=_unpublished)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row this worker may publish until its lease ends."""

    position: int
    attempts: int  # failed ones so far
    created_at: float
    event_id: str
    subject: str
    body: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Try again after `delay` seconds, or never (None): quarantined."""

    position: int
    reason: str
    delay: float | None
    consume_attempt: bool = True


async def add(tx: AsyncConnection, *events: Event, to: Iterable[str] = (BUS,)) -> int:
    """Store the events in the caller's transaction, one row per destination.

    Returns the number of new rows. An id that is there is not added again, so a caller that retries after a
    lost answer gets 0 and no second event.
    """
    destinations = sorted(set(to))
    postgres = tx.dialect.name == "postgresql"
    if postgres:
        await tx.execute(_LOCK_SUBJECTS, {"subjects": sorted({event.subject for event in events})})
        # Sent by the server when this transaction commits, never when it rolls back.
        await tx.execute(_NOTIFY, {"channel": CHANNEL, "destinations": destinations})
    stored = [
        {"event_id": e.id, "subject": e.subject, "type": e.type, "body": e.encode().decode()} for e in events
    ]
    rows = [{**row, "destination": destination} for row in stored for destination in destinations]
    # Counted by RETURNING: for several rows psycopg's rowcount is -1.
    return len((await tx.execute(_insert(postgres), rows)).all()) if rows else 0


async def claim(
    engine: AsyncEngine,
    worker_id: str,
    limit: int,
    lease: float,
    *,
    destination: str = BUS,
    hold: bool = True,
) -> list[Claimed]:
    """Take up to `limit` events, oldest first, for `lease` seconds; of a subject always the next in line."""
    statement = _claim(is_postgres(engine), hold)
    wanted = {"to": destination, "worker": worker_id, "max": limit, "lease": lease}
    if is_postgres(engine):  # a transaction by itself: no round trips for BEGIN and COMMIT
        async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            found = (await connection.execute(statement, wanted)).all()
    else:
        found = await in_one_hop(engine, lambda tx: tx.execute(statement, wanted).all(), write=True)
    return sorted((Claimed(*row) for row in found), key=lambda row: row.position)


async def settle(
    engine: AsyncEngine,
    worker_id: str,
    *,
    published: Sequence[int] = (),
    failed: Sequence[Failure] = (),
    released: Sequence[int] = (),
) -> None:
    """Write down what became of a batch. `released`: not tried, free for anybody at once.

    Published is a fact whoever holds the lease by now; the rest only counts while it is still ours.
    """
    now = clock(is_postgres(engine))
    ours = outbox.c.claimed_by == worker_id

    def write(tx: Connection) -> None:
        if published:
            done = update(outbox).where(outbox.c.position.in_(published))
            tx.execute(done.values(published_at=now, due_at=0.0, claimed_by=None, reason=None))
        if released:
            free = update(outbox).where(outbox.c.position.in_(released), ours)
            tx.execute(free.values(due_at=0.0, claimed_by=None))
        for failure in failed:
            again = NEVER if failure.delay is None else now + failure.delay
            spent = outbox.c.attempts + int(failure.consume_attempt)
            row = update(outbox).where(outbox.c.position == failure.position, ours, _unpublished)
            tx.execute(row.values(due_at=again, claimed_by=None, attempts=spent, reason=failure.reason))

    await in_one_hop(engine, write, write=True)


def clock(postgres: bool) -> ColumnElement[float]:
    """Epoch seconds by the database's clock: the relays' machines need not agree about the time."""
    if postgres:
        return cast(extract("epoch", func.statement_timestamp()), Double)
    return literal_column("((julianday('now') - 2440587.5) * 86400.0)", Double)


_LOCK_SUBJECTS = text(
    "SELECT pg_advisory_xact_lock(hashtextextended(s, 0)) FROM unnest(CAST(:subjects AS text[])) AS s"
)
_NOTIFY = text("SELECT pg_notify(:channel, d) FROM unnest(CAST(:destinations AS text[])) AS d")


@cache
def _insert(postgres: bool) -> Any:
    insert = (postgresql if postgres else sqlite).insert(outbox)
    given: dict[str, Any] = {
        name: bindparam(name) for name in ("destination", "event_id", "subject", "type", "body")
    }
    return (
        insert.values(**given, created_at=clock(postgres), due_at=0.0, attempts=0)
        .on_conflict_do_nothing()
        .returning(outbox.c.position)
    )


@cache
def _claim(postgres: bool, hold: bool) -> Any:
    now, row = clock(postgres), outbox.c
    waiting = (row.destination == bindparam("to"), _unpublished)
    # A subject with a leased, backing-off or quarantined event is taken as a whole.
    taken = select(row.subject).where(*waiting, row.due_at > now, *(() if hold else (row.due_at < NEVER,)))
    # SQLite would take the index by due time and sort the whole backlog for one batch; a sum hides it.
    due_at = row.due_at if postgres else row.due_at + 0.0
    free = (
        select(row.position, row.subject)
        .where(*waiting, due_at <= now, row.subject.not_in(taken))
        .order_by(row.position)
        .limit(bindparam("max"))
        .with_for_update(skip_locked=True)  # PostgreSQL only; SQLite has one writer at a time
        .cte("free")
    )
    # What SKIP LOCKED skipped is being claimed by somebody else right now: its successors are not ours.
    skipped = (
        select(row.subject, func.min(row.position).label("position"))
        .where(*waiting, due_at < NEVER, row.position <= select(func.max(free.c.position)).scalar_subquery())
        .where(row.subject.in_(select(free.c.subject)), row.position.not_in(select(free.c.position)))
        .group_by(row.subject)
        .cte("skipped")
    )
    overtaken = exists().where(skipped.c.subject == row.subject, skipped.c.position < row.position)
    return (
        update(outbox)
        .where(row.position.in_(select(free.c.position)), ~overtaken)
        .values(due_at=now + bindparam("lease", type_=Double), claimed_by=bindparam("worker"))
        .returning(row.position, row.attempts, row.created_at, row.event_id, row.subject, row.body)
    )

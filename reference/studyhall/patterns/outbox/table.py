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
    LargeBinary,
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
    true,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.elements import ColumnElement

from ..core.errors import clean_text
from ..core.store import in_one_hop, insert, is_postgres, metadata
from ..event_schema import Event

__all__ = ["BUS", "CHANNEL", "Claimed", "Failure", "add", "claim", "clock", "outbox", "settle"]

BUS = "bus"  # the default destination; fan-out adds one row per queue
CHANNEL = "outbox"  # PostgreSQL NOTIFY channel, payload: the destination
NEVER = float("inf")
MAX_REASON = 1000  # characters
BATCH_BYTES = (
    8 * 1024 * 1024
)  # of bodies in one batch; a relay needs about four times that while it publishes

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
# A number instead of infinity: both databases read it the same way, in an index and in a search.
_not_given_up = outbox.c.due_at < literal_column("1e300")
# Partial: they hold only what still has to be published, so a million published rows cost a claim nothing, nor
# do those in quarantine.
for _name, _columns, _rows in (
    ("outbox_to_publish", (outbox.c.destination, outbox.c.position), _unpublished & _not_given_up),
    ("outbox_by_subject", (outbox.c.destination, outbox.c.subject, outbox.c.due_at), _unpublished),
):
    Index(_name, *_columns, postgresql_where=_rows, sqlite_where=_rows)


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
    if is_postgres(tx):
        await tx.execute(_LOCK_SUBJECTS, {"subjects": sorted({event.subject for event in events})})
        # Sent by the server when this transaction commits, never when it rolls back.
        await tx.execute(_NOTIFY, {"channel": CHANNEL, "destinations": destinations})
    stored = [
        {"event_id": e.id, "subject": e.subject, "type": e.type, "body": e.encode().decode()} for e in events
    ]
    rows = [{**row, "destination": destination} for row in stored for destination in destinations]
    # Counted by RETURNING: for several rows psycopg's rowcount is -1.
    return len((await tx.execute(_new_row(tx), rows)).all()) if rows else 0


async def claim(
    engine: AsyncEngine,
    worker_id: str,
    limit: int,
    lease: float,
    *,
    destination: str = BUS,
    hold: bool = True,
    max_bytes: int = BATCH_BYTES,
) -> list[Claimed]:
    """Take up to `limit` events, oldest first, for `lease` seconds; of a subject always the next in line.

    Fewer when their bodies reach `max_bytes` before that, but always one.
    """
    statement = _claim(is_postgres(engine), hold)
    wanted = {"to": destination, "worker": worker_id, "max": limit, "lease": lease, "bytes": max_bytes}
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

    Published is a fact whoever holds the lease by now, in a transaction of its own; the rest only counts while
    it is still ours.
    """
    now = clock(is_postgres(engine))
    ours = outbox.c.claimed_by == worker_id

    def write_published(tx: Connection) -> None:
        done = update(outbox).where(outbox.c.position.in_(published))
        tx.execute(done.values(published_at=now, due_at=0.0, claimed_by=None, reason=None))

    def write_rest(tx: Connection) -> None:
        if released:
            free = update(outbox).where(outbox.c.position.in_(released), ours)
            tx.execute(free.values(due_at=0.0, claimed_by=None))
        for failure in failed:
            again = NEVER if failure.delay is None else now + failure.delay
            spent = outbox.c.attempts + int(failure.consume_attempt)
            row = update(outbox).where(outbox.c.position == failure.position, ours, _unpublished)
            reason = clean_text(failure.reason, MAX_REASON)
            tx.execute(row.values(due_at=again, claimed_by=None, attempts=spent, reason=reason))

    if published:
        await in_one_hop(engine, write_published, write=True)
    if released or failed:
        await in_one_hop(engine, write_rest, write=True)


def clock(postgres: bool) -> ColumnElement[float]:
    """Epoch seconds by the database's clock: the relays' machines need not agree about the time."""
    if postgres:
        return cast(extract("epoch", func.statement_timestamp()), Double)
    return literal_column("((julianday('now') - 2440587.5) * 86400.0)", Double)


_LOCK_SUBJECTS = text(
    "SELECT pg_advisory_xact_lock(hashtextextended(s, 0)) FROM unnest(CAST(:subjects AS text[])) AS s"
)
_NOTIFY = text("SELECT pg_notify(:channel, d) FROM unnest(CAST(:destinations AS text[])) AS d")


_new_rows: dict[bool, Any] = {}  # built once for each database: making a statement costs more than sending it


def _new_row(tx: AsyncConnection) -> Any:
    postgres = is_postgres(tx)
    if postgres not in _new_rows:
        names = ("destination", "event_id", "subject", "type", "body")
        given: dict[str, Any] = {name: bindparam(name) for name in names}
        new = insert(tx, outbox).values(**given, created_at=clock(postgres), due_at=0.0, attempts=0)
        _new_rows[postgres] = new.on_conflict_do_nothing().returning(outbox.c.position)
    return _new_rows[postgres]


@cache
def _claim(postgres: bool, hold: bool) -> Any:
    now, row = clock(postgres), outbox.c
    waiting = (row.destination == bindparam("to"), _unpublished, _not_given_up)
    # A subject with a leased, backing-off or quarantined event is taken as a whole. Asked per row, through the
    # index: as a set (NOT IN, NOT EXISTS) it is read as a whole for every claim, 55 s for 200,000 in quarantine.
    other = outbox.alias("other").c
    same_subject = (other.destination == bindparam("to"), other.subject == row.subject)
    taken = (
        select(literal_column("1"))
        .where(*same_subject, other.published_at.is_(None), other.due_at > now)
        .where(*(() if hold else (other.due_at < literal_column("1e300"),)))
        .limit(1)
        .correlate(outbox)
        .scalar_subquery()
    )
    size = func.octet_length(row.body) if postgres else func.length(cast(row.body, LargeBinary))
    free = (
        select(row.position, row.subject, size.label("size"))
        # The sum hides the column from the planners: by position a batch is found without sorting the backlog,
        # and they see that only with statistics.
        .where(*waiting, row.due_at + 0.0 <= now, taken.is_(None))
        .order_by(row.position)
        .limit(bindparam("max"))
        .with_for_update(skip_locked=True)  # PostgreSQL only; SQLite has one writer at a time
        .cte("free")
    )
    before = func.sum(free.c.size).over(order_by=free.c.position) - free.c.size
    sized = select(free.c.position, before.label("before")).cte("sized")
    few = select(sized.c.position).where(sized.c.before < bindparam("bytes"))
    mine: list[ColumnElement[bool]] = [row.position.in_(few)]
    if postgres:
        # What SKIP LOCKED skipped is being claimed by somebody else right now: its successors are not ours.
        last = select(func.max(free.c.position)).scalar_subquery()
        skipped = (
            select(row.subject, row.position)
            .where(*waiting, row.position <= last, row.position.not_in(select(free.c.position)))
            .where(row.subject.in_(select(free.c.subject)).is_(true()))  # IS TRUE: a hashed set, never a loop
            .order_by(row.position)  # for the planner, as above
            .cte("skipped")
            .prefix_with("MATERIALIZED")  # once, not once per row
        )
        mine.append(~exists().where(skipped.c.subject == row.subject, skipped.c.position < row.position))
    return (
        update(outbox)
        .where(*mine)
        .values(due_at=now + bindparam("lease", type_=Double), claimed_by=bindparam("worker"))
        .returning(row.position, row.attempts, row.created_at, row.event_id, row.subject, row.body)
    )

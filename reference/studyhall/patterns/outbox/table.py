"""Outbox: the event is a row in the transaction that made it true; a relay publishes it afterwards.

Promise: what commits is published, what rolls back never is, and nothing is visible before the commit.
Events with one subject (aggregate key) reach the bus in commit order, however many relays run and
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

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    String,
    Table,
    Text,
    bindparam,
    cast,
    extract,
    func,
    literal_column,
    text,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.elements import ColumnElement

from ..core.store import insert, is_postgres, metadata

if TYPE_CHECKING:  # a command that looks at the outbox reads no event
    from ..core.event import Event

__all__ = ["BUS", "CHANNEL", "MAX_REASON", "NEVER", "add", "clock", "not_given_up", "outbox", "unpublished"]

BUS = "bus"  # the default destination; fan-out adds one row per queue
CHANNEL = "outbox"  # PostgreSQL NOTIFY channel, payload: the destination
NEVER = float("inf")
MAX_REASON = 1000  # characters

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
unpublished = outbox.c.published_at.is_(None)
Index("outbox_event", outbox.c.event_id, outbox.c.destination, unique=True)
# A number instead of infinity: both databases read it the same way, in an index and in a search.
not_given_up = outbox.c.due_at < literal_column("1e300")
# Partial: they hold only what is still to be published, so a million published rows, or those in quarantine,
# cost a claim nothing.
for _name, _columns, _rows in (
    ("outbox_to_publish", (outbox.c.destination, outbox.c.position), unpublished & not_given_up),
    ("outbox_by_subject", (outbox.c.destination, outbox.c.subject, outbox.c.due_at, outbox.c.position), unpublished),
):
    Index(_name, *_columns, postgresql_where=_rows, sqlite_where=_rows)


async def add(tx: AsyncConnection, *events: "Event", to: Iterable[str] = (BUS,)) -> int:
    """Store the events in the caller's transaction, one row per destination.

    Returns the number of new rows. An existing id is not added again, so a caller that retries after a
    lost answer gets 0 and no second event.
    """
    destinations = sorted(set(to))
    if is_postgres(tx):
        await tx.execute(_LOCK_SUBJECTS, {"subjects": sorted({event.subject for event in events})})
        # Sent by the server when this transaction commits, never when it rolls back.
        await tx.execute(_NOTIFY, {"channel": CHANNEL, "destinations": destinations})
    stored = [{"event_id": e.id, "subject": e.subject, "type": e.type, "body": e.encode().decode()} for e in events]
    rows = [{**row, "destination": destination} for row in stored for destination in destinations]
    # Counted by RETURNING: for several rows psycopg's rowcount is -1.
    return len((await tx.execute(_new_row(tx), rows)).all()) if rows else 0


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

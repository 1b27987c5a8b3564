"""The outbox for code without an event loop: scripts, Flask and Django views, Celery tasks. Any DB-API connection.

    create(connection)                       # the table, if it is missing; a migration of your own does as well
    with connection:                         # your transaction, on sqlite3, psycopg or in Django's transaction.atomic()
        connection.execute("INSERT INTO bookings …")
        add(connection, event)               # a row beside it: both commit or neither

Promise: that of `outbox.add`, in the same table `outbox`: what commits is published, what rolls back never is, an id
already there is not added again. A relay (`outbox.relay`) in a process of its own publishes it.

When it does not hold: on a connection that commits each statement by itself `add` refuses outside a transaction:
the event would go out before the fact. SQLite and PostgreSQL only.
"""

from collections.abc import Iterable
from typing import Any

from .core.event import Event
from .core.failures import Permanent

__all__ = ["add", "create"]

_POSITION = {"sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT", "postgresql": "BIGSERIAL PRIMARY KEY"}
_FLOAT = {"sqlite": "DOUBLE", "postgresql": "DOUBLE PRECISION"}
_CREATE = (
    "CREATE TABLE IF NOT EXISTS outbox (position {position}, destination VARCHAR(100) NOT NULL, "
    "event_id VARCHAR(200) NOT NULL, subject VARCHAR(300) NOT NULL, type VARCHAR(200) NOT NULL, body TEXT NOT NULL, "
    "created_at {float} NOT NULL, due_at {float} NOT NULL, claimed_by VARCHAR(100), attempts INTEGER NOT NULL, "
    "published_at {float}, reason TEXT)",
    "CREATE UNIQUE INDEX IF NOT EXISTS outbox_event ON outbox (event_id, destination)",
    "CREATE INDEX IF NOT EXISTS outbox_to_publish ON outbox (destination, position) "
    "WHERE published_at IS NULL AND due_at < 1e300",
    "CREATE INDEX IF NOT EXISTS outbox_by_subject ON outbox (destination, subject, due_at, position) "
    "WHERE published_at IS NULL",
)
# By the database's clock: the machines need not agree about the time.
_NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(extract(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)",
}
_ADD = (
    "INSERT INTO outbox (destination, event_id, subject, type, body, created_at, due_at, attempts) "
    "VALUES (?, ?, ?, ?, ?, {now}, 0, 0) ON CONFLICT DO NOTHING"
)


def add(connection: Any, *events: Event, to: Iterable[str] = ("bus",)) -> int:
    """In the caller's transaction, one row per event and destination. Returns the number of new rows."""
    kind, destinations = _kind(connection), sorted(set(to))
    _refuse_autocommit(connection)
    if kind == "postgresql":
        # As `outbox.add`: commit order is publish order within a subject, and relays wake when this commits.
        for subject in sorted({event.subject for event in events}):
            _execute(connection, "SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", subject)
        for destination in destinations:
            _execute(connection, "SELECT pg_notify('outbox', ?)", destination)
    new = 0
    for event in events:
        row = (event.id, event.subject, event.type, event.encode().decode())
        for destination in destinations:
            new += _execute(connection, _ADD.format(now=_NOW[kind]), destination, *row).rowcount
    return new


def create(connection: Any) -> None:
    kind = _kind(connection)
    for statement in _CREATE:
        _execute(connection, statement.format(position=_POSITION[kind], float=_FLOAT[kind]))
    if not hasattr(connection, "in_atomic_block"):
        connection.commit()


def _kind(connection: Any) -> str:
    if type(connection).__module__.startswith("sqlite3"):
        return "sqlite"
    return str(getattr(connection, "vendor", "postgresql"))  # Django says what it talks to


def _refuse_autocommit(connection: Any) -> None:
    if hasattr(connection, "in_atomic_block"):
        alone = not connection.in_atomic_block
    elif _kind(connection) == "sqlite":
        alone = connection.isolation_level is None and not connection.in_transaction
    else:
        alone = connection.autocommit and not connection.info.transaction_status
    if alone:
        raise Permanent("add() belongs in the transaction of its fact; there is none on this connection")


def _execute(connection: Any, statement: str, *values: Any) -> Any:
    cursor = connection.cursor()
    plain_sqlite = type(connection).__module__.startswith("sqlite3")
    cursor.execute(statement if plain_sqlite else statement.replace("?", "%s"), values)
    return cursor

"""`once` for code without an event loop: scripts, Flask and Django views, Celery tasks. Any DB-API connection.

    create(connection)                                        # the table, if it is missing
    once(connection, "mails", order_id, payload, effect)      # effect(connection) does its inserts and returns JSON

Promise: that of `idempotency`, in the same table `inbox`: for one (consumer, key) the effect is committed at most once,
every duplicate gets the first one's result, and the same key with another payload is an error. A connection in a
transaction (a `transaction.atomic()` of Django, say) is joined: marker and effect commit with it, and an effect that
raises leaves nothing even if its caller goes on. Otherwise `once` opens a transaction and commits it.

When it does not hold: an effect that commits by itself, and effects outside the database (`outside_call`). SQLite and
PostgreSQL only. `effect` must use this connection, or Django's models on the same database.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .core.failures import KeyReused, Permanent, Transient
from .core.plain_json import dumps, fingerprint

__all__ = ["KeyReused", "create", "execute", "is_sqlite", "once", "transaction"]

_CREATE = (
    "CREATE TABLE IF NOT EXISTS inbox (consumer TEXT NOT NULL, key TEXT NOT NULL, fingerprint VARCHAR(64) NOT NULL, "
    "result TEXT, at FLOAT NOT NULL, PRIMARY KEY (consumer, key))",
    "CREATE INDEX IF NOT EXISTS inbox_at ON inbox (at)",
)
_CLAIM = "INSERT INTO inbox (consumer, key, fingerprint, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
_STORED = "SELECT fingerprint, result FROM inbox WHERE consumer = ? AND key = ?"
_RESULT = "UPDATE inbox SET result = ? WHERE consumer = ? AND key = ?"


def once(connection: Any, consumer: str, key: str, payload: Any, effect: Callable[[Any], Any]) -> Any:
    """Run `effect(connection)` unless it was done before; either way return the result of the run that counted."""
    mark = fingerprint(payload)
    with transaction(connection):
        # The marker goes first: a concurrent duplicate waits here for our commit and then finds the row.
        if execute(connection, _CLAIM, consumer, key, mark, time.time()).rowcount == 1:
            result = dumps(effect(connection))
            execute(connection, _RESULT, result, consumer, key)
            return json.loads(result)
        row = execute(connection, _STORED, consumer, key).fetchone()
    if row is None:
        raise Transient("The marker was purged while its duplicate was being answered: try again.")
    if row[0] != mark:
        raise KeyReused(f"{KeyReused.__doc__} Key: {key[:120]!r}.")
    return json.loads(row[1])


def create(connection: Any) -> None:
    with transaction(connection):
        for statement in _CREATE:
            execute(connection, statement)


@contextmanager
def transaction(connection: Any) -> Iterator[None]:
    """Joins the one that is open; otherwise begins one and commits it."""
    begin, commit, rollback = "SAVEPOINT once", "RELEASE SAVEPOINT once", "ROLLBACK TO SAVEPOINT once"
    if not _in_transaction(connection):
        begin, commit, rollback = ("BEGIN IMMEDIATE" if is_sqlite(connection) else "BEGIN", "COMMIT", "ROLLBACK")
        if not getattr(connection, "autocommit", True):  # psycopg begins by itself
            begin = "SELECT 1"
    execute(connection, begin)
    try:
        yield
        execute(connection, commit)
    except BaseException:
        execute(connection, rollback)
        raise


def _in_transaction(connection: Any) -> bool:
    if hasattr(connection, "in_atomic_block"):  # Django
        if not connection.in_atomic_block:
            raise Permanent("with Django call once() inside transaction.atomic()")
        return True
    if is_sqlite(connection):
        return bool(connection.in_transaction)
    return bool(connection.info.transaction_status)  # psycopg; 0 is idle


def is_sqlite(connection: Any) -> bool:
    return type(connection).__module__.startswith("sqlite3")


def execute(connection: Any, statement: str, *values: Any) -> Any:
    """A cursor. `?` in the statement stands for a value, whatever the driver's own mark is."""
    cursor = connection.cursor()
    cursor.execute(statement if is_sqlite(connection) else statement.replace("?", "%s"), values)
    return cursor

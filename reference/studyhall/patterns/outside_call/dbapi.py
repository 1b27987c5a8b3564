"""The ledger on any DB-API connection to SQLite or PostgreSQL: sqlite3, psycopg, Django's.

    ledger = DbApiLedger(lambda: sqlite3.connect(path))
    ledger = DbApiLedger(lambda: psycopg.connect(url))
    ledger = DbApiLedger(django.db.connection.copy)          # a connection of its own, outside every atomic block
    ledger.create()                                          # the table, if it is missing
    calls = OutsideCalls(InThreads(ledger), "carrier", …)    # in async code; else SyncOutsideCalls(ledger, …)

Promise: what `write` stored is committed when it returns. So the factory must make a connection of its own: one
that is in a transaction of the caller would take the row back with it, and the call would be made again. Call it
before the caller's transaction, not inside: SQLite has one writer, so the ledger would wait for its own caller.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from .ledger import Call, State

__all__ = ["CREATE", "DbApiLedger", "Execute", "InThreads", "purge", "read", "unclear", "write"]

Execute = Callable[[str, Sequence[Any]], Any]  # a statement with `?` and its values; returns a cursor

# Of SQLite and PostgreSQL alike; `store` runs them too.
CREATE = """CREATE TABLE IF NOT EXISTS outside_calls (
provider VARCHAR(100) NOT NULL, key TEXT NOT NULL, state VARCHAR(20) NOT NULL, version INTEGER NOT NULL,
tries INTEGER NOT NULL, first DOUBLE PRECISION NOT NULL, since DOUBLE PRECISION NOT NULL, result TEXT,
reason TEXT NOT NULL, PRIMARY KEY (provider, key))"""
_READ = """SELECT CLOCK, provider, key, state, version, tries, first, since, result, reason
FROM (SELECT 1 AS one) AS always LEFT JOIN outside_calls ON provider = ? AND key = ?"""
_INSERT = """INSERT INTO outside_calls (state, version, tries, first, since, result, reason, provider, key)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_UPDATE = """UPDATE outside_calls SET state = ?, version = ?, tries = ?, first = ?, since = ?, result = ?, reason = ?
WHERE provider = ? AND key = ? AND version = ?"""
_UNCLEAR = """SELECT provider, key, state, version, tries, first, since, result, reason FROM outside_calls
WHERE provider = ? AND state = 'unclear' ORDER BY since LIMIT ?"""
_PURGE = """DELETE FROM outside_calls
WHERE provider = ? AND state IN ('done', 'refused') AND since < CLOCK - ?"""
_CLOCK = {"sqlite": "(julianday('now') - 2440587.5) * 86400.0", "postgresql": "EXTRACT(EPOCH FROM clock_timestamp())"}


class DbApiLedger:
    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect

    def create(self) -> None:
        with self._transaction() as (execute, _):
            execute(CREATE, ())

    def read(self, provider: str, key: str) -> Call:
        with self._transaction() as (execute, dialect):
            return read(execute, dialect, provider, key)

    def write(self, call: Call) -> bool:
        with self._transaction() as (execute, _):
            return write(execute, call)

    def unclear(self, provider: str, limit: int) -> list[Call]:
        with self._transaction() as (execute, _):
            return unclear(execute, provider, limit)

    def purge(self, provider: str, older_than: float) -> int:
        with self._transaction() as (execute, dialect):
            return purge(execute, dialect, provider, older_than)

    @contextmanager
    def _transaction(self) -> Iterator[tuple[Execute, str]]:
        with closing(self._connect()) as connection:
            # Django says what it talks to, and takes %s for all of them.
            plain_sqlite = type(connection).__module__.startswith("sqlite3")
            vendor = "sqlite" if plain_sqlite else getattr(connection, "vendor", "postgresql")
            cursor = connection.cursor()

            def execute(statement: str, values: Sequence[Any]) -> Any:
                cursor.execute(statement if plain_sqlite else statement.replace("?", "%s"), values)
                return cursor

            yield execute, vendor
            connection.commit()


class InThreads:
    """A synchronous ledger for `OutsideCalls`: each operation in a thread, so that the event loop goes on."""

    def __init__(self, ledger: DbApiLedger) -> None:
        self._ledger = ledger

    async def read(self, provider: str, key: str) -> Call:
        return await asyncio.to_thread(self._ledger.read, provider, key)

    async def write(self, call: Call) -> bool:
        return await asyncio.to_thread(self._ledger.write, call)

    async def unclear(self, provider: str, limit: int) -> list[Call]:
        return await asyncio.to_thread(self._ledger.unclear, provider, limit)

    async def purge(self, provider: str, older_than: float) -> int:
        return await asyncio.to_thread(self._ledger.purge, provider, older_than)


# ---- the statements


def read(execute: Execute, dialect: str, provider: str, key: str) -> Call:
    """One row, found or not: it carries the time."""
    now, *row = execute(_READ.replace("CLOCK", _CLOCK[dialect]), (provider, key)).fetchone()
    return Call(provider, key, now=float(now)) if row[0] is None else _call(row, float(now))


def write(execute: Execute, call: Call) -> bool:
    values = [str(call.state), call.version, call.tries, call.first, call.since, call.result, call.reason]
    values += [call.provider, call.key]
    new = call.version == 1
    done = execute(_INSERT, values) if new else execute(_UPDATE, [*values, call.version - 1])
    return int(done.rowcount) == 1


def unclear(execute: Execute, provider: str, limit: int) -> list[Call]:
    return [_call(row) for row in execute(_UNCLEAR, (provider, limit)).fetchall()]


def purge(execute: Execute, dialect: str, provider: str, older_than: float) -> int:
    return int(execute(_PURGE.replace("CLOCK", _CLOCK[dialect]), (provider, older_than)).rowcount)


def _call(row: Sequence[Any], now: float = 0.0) -> Call:
    provider, key, state, version, tries, first, since, result, reason = row
    return Call(provider, key, State(state), version, tries, first, since, result, reason, now)

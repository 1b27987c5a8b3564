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

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from . import sql
from .ledger import Call

__all__ = ["DbApiLedger", "InThreads"]


class DbApiLedger:
    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect

    def create(self) -> None:
        with self._transaction() as (execute, _):
            execute(sql.CREATE, ())

    def read(self, provider: str, key: str) -> Call:
        with self._transaction() as (execute, dialect):
            return sql.read(execute, dialect, provider, key)

    def write(self, call: Call) -> bool:
        with self._transaction() as (execute, _):
            return sql.write(execute, call)

    def unclear(self, provider: str, limit: int) -> list[Call]:
        with self._transaction() as (execute, _):
            return sql.unclear(execute, provider, limit)

    def purge(self, provider: str, older_than: float) -> int:
        with self._transaction() as (execute, dialect):
            return sql.purge(execute, dialect, provider, older_than)

    @contextmanager
    def _transaction(self) -> Iterator[tuple[sql.Execute, str]]:
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

"""Outbox wake-up: a relay sleeps until somebody commits instead of asking the table all the time.

Promise: `wait` returns soon after a commit that added an event, from any process. PostgreSQL: LISTEN, with the
NOTIFY sent in the transaction of `outbox.add`. SQLite: the counter behind `PRAGMA data_version`, which costs
microseconds and takes no lock. Both on a connection outside the pool.

When it does NOT hold: it is a hint, not a delivery. Behind a pooler in transaction mode LISTEN hears
nothing, and a lost connection misses what was sent meanwhile; the relay then finds the events at its next
poll.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.store import answers_within, is_postgres
from .table import CHANNEL

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg.rows import TupleRow

__all__ = ["Wakeup", "open_wakeup"]

LOOK = 0.02  # seconds between two looks at the SQLite counter


class Wakeup(Protocol):
    async def wait(self) -> None: ...

    async def close(self) -> None: ...


async def open_wakeup(store: AsyncEngine) -> Wakeup:
    """Hears every commit from the moment it returns. Raises `OSError` when the database is away."""
    if not is_postgres(store):
        return _DataVersion(store.url.database or "")
    import psycopg

    try:
        pooled = await store.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()
        await connection.set_autocommit(True)
        await connection.execute(f"LISTEN {CHANNEL}".encode())
    except (psycopg.Error, SQLAlchemyError) as error:
        raise ConnectionError(f"cannot listen for new events: {error}") from error
    return _Listen(connection)


class _Listen:
    def __init__(self, connection: AsyncConnection[TupleRow]) -> None:
        self._connection = connection

    async def wait(self) -> None:
        import psycopg

        try:
            with answers_within(None):  # silence is normal here
                async for _ in self._connection.notifies(stop_after=1):
                    pass
                async for _ in self._connection.notifies(timeout=0):  # one look at the table answers a burst
                    pass
        except psycopg.Error as error:
            raise ConnectionError(f"no longer listening for new events: {error}") from error

    async def close(self) -> None:
        await self._connection.close()


class _DataVersion:
    def __init__(self, path: str) -> None:
        # Never in a transaction, whose snapshot would hide every new commit. timeout=0: never block the loop.
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        self._seen = 0

    async def wait(self) -> None:
        while (version := self._version()) == self._seen:
            await asyncio.sleep(LOOK)  # nothing tells us of another process' commit
        self._seen = version

    def _version(self) -> int:
        try:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.OperationalError:
            # Locked for a moment by a checkpoint or a recovery: look at the table.
            return -1

    async def close(self) -> None:
        self._connection.close()

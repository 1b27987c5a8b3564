"""Outbox wake-up: a relay sleeps until somebody commits instead of asking the table all the time.

Promise: `wait` returns soon after a commit that added an event, from any process, and after `timeout` at
the latest. PostgreSQL: LISTEN, with the NOTIFY sent in the transaction of `outbox.add`. SQLite: the counter
behind `PRAGMA data_version`, which reads shared memory and touches neither table nor lock.

When it does NOT hold: it is a hint, not a delivery. Behind a pooler in transaction mode LISTEN hears
nothing, and a lost connection misses what was sent meanwhile; the relay then finds the events at its next
poll.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .outbox import CHANNEL
from .store import is_postgres

__all__ = ["Wakeup", "open_wakeup"]

LOOK = 0.02  # seconds between two looks at the SQLite counter: 50 cheap reads a second


class Wakeup(Protocol):
    async def wait(self, timeout: float) -> None: ...  # noqa: ASYNC109

    async def close(self) -> None: ...


async def open_wakeup(engine: AsyncEngine) -> Wakeup:
    """Listens from the moment it returns. Raises what the driver raises when the database is away."""
    connection = await engine.connect()
    raw: Any = (await connection.get_raw_connection()).driver_connection
    if not is_postgres(engine):
        return _DataVersion(connection, raw)
    await raw.set_autocommit(True)
    await raw.execute(f"LISTEN {CHANNEL}")
    return _Listen(connection, raw)


class _Listen:
    def __init__(self, connection: AsyncConnection, raw: Any) -> None:
        self._connection = connection
        self._raw = raw

    async def wait(self, timeout: float) -> None:  # noqa: ASYNC109
        async for _ in self._raw.notifies(timeout=timeout, stop_after=1):
            pass
        async for _ in self._raw.notifies(timeout=0):  # one look at the table answers a whole burst
            pass

    async def close(self) -> None:
        await self._connection.invalidate()  # a pooled connection must not go on listening
        await self._connection.close()


class _DataVersion:
    def __init__(self, connection: AsyncConnection, raw: Any) -> None:
        self._connection = connection
        self._raw = raw
        self._seen: int | None = None

    async def wait(self, timeout: float) -> None:  # noqa: ASYNC109
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            # Outside any transaction: inside one, the snapshot would hide every new commit.
            version = (await self._raw.execute_fetchall("PRAGMA data_version"))[0][0]
            if version != self._seen:
                self._seen = version
                return
            await asyncio.sleep(LOOK)

    async def close(self) -> None:
        await self._connection.close()

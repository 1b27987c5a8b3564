"""A PostgreSQL connection that falls silent: packets swallowed, nothing reset, and nobody is told.

Promise: when the server's machine gives no sign of life, the network's own checks end a connection after about
`SILENCE` seconds. Inside `answers_within` (the relay, the saga runner) every statement has a limit of its own as
well: one that is not answered in time breaks its connection, which then reads as a server that went away.

When it does NOT hold: outside `answers_within` a proxy that lives and passes nothing on passes those checks, and a
statement waits forever. The limit cannot tell a slow statement from a silent server: give long ones a longer one.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

__all__ = ["ANSWER", "SILENCE", "SOCKET_OPTIONS", "answers_within", "connect"]

SILENCE = 10  # seconds
ANSWER = 12.0  # seconds: more than `store.LOCK_WAIT`, after which the server itself ends a wait for a lock
# All are needed: keepalives speak only while nothing is on its way, the timeout counts only what is.
SOCKET_OPTIONS = {
    "keepalives": 1,
    "keepalives_idle": SILENCE // 2,
    "keepalives_interval": 1,
    "keepalives_count": SILENCE // 2,
    "tcp_user_timeout": SILENCE * 1000,
}
_limit: ContextVar[float | None] = ContextVar("store_answers_within", default=None)


@contextmanager
def answers_within(seconds: float | None = ANSWER) -> Iterator[None]:
    """For everything that runs or is started in here. None: no limit."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


async def connect(conninfo: str = "", **options: Any) -> Any:
    """A psycopg connection with both; `options` and what the address says go first."""
    return await _connection_class().connect(conninfo, **{**SOCKET_OPTIONS, **options})


@cache
def _connection_class() -> Any:
    import psycopg  # only where there is a PostgreSQL

    class Connection(psycopg.AsyncConnection[Any]):
        async def wait(self, *args: Any, **kwargs: Any) -> Any:
            if (limit := _limit.get()) is None:
                return await super().wait(*args, **kwargs)
            alarm = asyncio.get_running_loop().call_later(limit, self._hang_up)
            try:
                return await super().wait(*args, **kwargs)
            finally:
                alarm.cancel()

        def _hang_up(self) -> None:
            # Not a cancellation: psycopg answers that by asking the silent server to cancel, and waits again.
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)

    return Connection

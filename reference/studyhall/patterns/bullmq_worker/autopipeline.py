"""A Redis client that sends the script calls of one turn of the event loop in one write, on one connection.

A worker with 50 running jobs makes 50 script calls at about the same time. redis-py gives each of them a
connection, a lock, a timeout and two trips through the event loop; here they leave together and their
replies, which Redis sends in the order of the calls, are handed out as they arrive.

Promise: every call gets its own reply or an error, never another's reply; a caller that is cancelled leaves
the connection in order; when the connection breaks, every call on it fails with `ConnectionError` at once,
and one that stops answering fails with `TimeoutError`.
It does NOT repeat anything: a call that failed that way may have been executed. The caller has to know what a
second execution would do. Blocking commands do not belong here, they would hold up everybody's replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from ..core.connections import NotPrimary, meaning

__all__ = ["AutoPipeline"]

SILENCE_TICKS = 5  # seconds without any reply while some are owed


class AutoPipeline(Redis):
    """`redis.asyncio.Redis` with script calls pipelined. All other commands take redis-py's own path."""

    _wire: _Wire | None = None
    _opening: asyncio.Task[_Wire] | None = None
    _closed = False

    def execute_command(self, *args: Any, **options: Any) -> Any:  # an awaitable
        # After a restart all callers load at once: no connection for each of them.
        if args[0] == "SCRIPT LOAD":
            args = ("SCRIPT", "LOAD", *args[1:])
        elif args[0] != "EVALSHA":
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if self._wire is not None and self._wire.open:
            return self._wire.call(args)
        return self._open_and_call(args)

    async def _open_and_call(self, args: tuple[Any, ...]) -> Any:
        if self._closed:  # a latecomer must not open a connection that nobody would close
            raise ConnectionError("this client is closed")
        # Many jobs find the connection gone at once. They share one attempt and its failure: one after the
        # other they would each wait for the timeout of a frozen server.
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._open())
        wire = await asyncio.shield(self._opening)
        return await wire.call(args)

    async def _open(self) -> _Wire:
        self._wire = _Wire(self, await self.connection_pool.get_connection())  # type: ignore[no-untyped-call]
        return self._wire

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._wire is not None:
            self._wire.close(ConnectionError("the client was closed"))
            await asyncio.wait({self._wire.reader})
        await super().aclose(close_connection_pool)


class _Wire:
    """One open connection: calls out in order, replies back in the same order."""

    def __init__(self, client: AutoPipeline, connection: AbstractConnection) -> None:
        self._pool, self._connection = client.connection_pool, connection
        # redis-py opens the connection (TLS, Sentinel, AUTH, SELECT, CLIENT SETNAME) and has nothing left to
        # read on it; its streams are the one private thing used here.
        stream, writer = connection._reader, connection._writer
        assert stream is not None
        assert writer is not None
        self._stream, self._writer = stream, writer
        self._owed: deque[asyncio.Future[Any]] = deque()
        self._outbox: list[bytes] = []
        self._replies = hiredis.Reader(
            encoding="utf-8", errors="replace", replyError=_as_redis_error, notEnoughData=_MORE
        )
        self._loop = asyncio.get_running_loop()
        self._silent = 0
        self.open = True
        self.reader = self._loop.create_task(self._read(), name="autopipeline reader")
        self._watch: asyncio.TimerHandle = self._loop.call_later(1.0, self._check_silence)

    def call(self, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        reply = self._loop.create_future()
        if not self.open:
            reply.set_exception(ConnectionError("the connection to Redis broke before the call was sent"))
            return reply
        self._owed.append(reply)
        if not self._outbox:
            self._loop.call_soon(self._flush)  # after every other task of this turn
        self._outbox.append(hiredis.pack_command(args))
        return reply

    def _flush(self) -> None:
        calls, self._outbox = self._outbox, []
        if self.open and calls:
            self._writer.write(b"".join(calls))

    async def _read(self) -> None:
        why: Exception = ConnectionError("Redis closed the connection; the outcome of the calls on it is unknown")
        try:
            while self.open and (data := await self._stream.read(1 << 18)):
                self._silent = 0
                self._replies.feed(data)
                while self._owed and (reply := self._replies.gets()) is not _MORE:
                    self._hand_out(reply)
        except (OSError, hiredis.ProtocolError) as error:
            why = ConnectionError(f"connection to Redis lost: {error}")
        finally:
            self.close(why)
            await self._connection.disconnect(nowait=True)
            await self._pool.release(self._connection)

    def _hand_out(self, reply: Any) -> None:
        caller = self._owed.popleft()
        # A demoted primary or one still loading: the next call must look for the server again.
        if isinstance(reply, NotPrimary | BusyLoadingError):
            self.close(reply)
        if caller.done():  # cancelled meanwhile; its reply is read anyway
            return
        if isinstance(reply, Exception):
            caller.set_exception(reply)
        else:
            caller.set_result(reply)

    def _check_silence(self) -> None:
        # Counted in ticks, not on the clock: after a turn of the loop that took 20 s the replies are there,
        # unread.
        self._silent = self._silent + 1 if self._owed else 0
        if self._silent > SILENCE_TICKS:
            self.close(TimeoutError(f"Redis did not answer for {SILENCE_TICKS} s; the outcome is unknown"))
        elif self.open:
            self._watch = self._loop.call_later(1.0, self._check_silence)

    def close(self, why: Exception) -> None:
        if not self.open:
            return
        self.open = False
        self._watch.cancel()
        self._writer.close()
        if asyncio.current_task() is not self.reader:
            self.reader.cancel()
        while self._owed:
            caller = self._owed.popleft()
            if not caller.done():
                caller.set_exception(why)


_MORE = object()
_KINDS = {
    "MASTERDOWN": MasterDownError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "READONLY": ReadOnlyError,
    "LOADING": BusyLoadingError,
    "OOM": OutOfMemoryError,
}


def _as_redis_error(message: str) -> Exception:
    return meaning(_KINDS.get(message.partition(" ")[0], ResponseError)(message))

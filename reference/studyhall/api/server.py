"""uvicorn, with the limits it lacks: a half-sent request is not waited for, and event streams end on SIGTERM."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from .state import ApiState

__all__ = ["MAX_CONNECTIONS", "MAX_HEADERS", "Impatient", "StoppingAtOnce"]

HEADER_SECONDS = 15.0
MAX_HEADERS = 32 * 1024
MAX_CONNECTIONS = 800  # below the 1,024 open files that a process usually gets


class Impatient(H11Protocol):
    """Closes a connection whose request line and headers are not complete in time; uvicorn waits forever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._timer is None:  # not again with every byte that trickles in
            self._timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class StoppingAtOnce(uvicorn.Server):
    """Tells event streams and background tasks when the process is told to stop. uvicorn would wait for the
    streams until its grace is over, and the tasks would hear of it only then."""

    def __init__(self, config: uvicorn.Config, api: FastAPI, grace: float) -> None:
        super().__init__(config)
        self._api, self._grace = api, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state: ApiState | None = getattr(self._api.state, "studyhall", None)
        if state is not None:
            state.streams.stopping.set()
            self._draining = asyncio.create_task(state.tasks.drain(self._grace))
        await super().shutdown(sockets)

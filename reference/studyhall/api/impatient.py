"""uvicorn with the limits it lacks: on connections, and on the time until a request's headers arrive.

uvicorn's own `limit_concurrency` answers a whole request with 503 and keeps every connection that has not sent one:
with a limit of 800 it held 820 half-sent requests, and would go on until it ran out of open files.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 15.0
MAX_HEADERS = 32 * 1024
MAX_CONNECTIONS = 800  # below the 1,024 open files that a process usually gets
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Impatient(H11Protocol):
    """Refuses connections beyond `limit_concurrency`, and closes one whose headers are not complete in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.write(FULL)
            transport.close()
        else:
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

"""One fixed address in front of servers that change behind it, and a network that loses bytes.

Connections stay where they were made, as behind a load balancer or a DNS name: only new ones follow `target`.
It runs in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["Proxy", "proxy_to"]


class Proxy:
    def __init__(self, target: int) -> None:
        self.target = target  # port on the loopback that new connections reach
        self.port = 0
        self._open: dict[asyncio.Task[None], int] = {}  # connection: its port as the server sees it
        self._swallowed: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def swallow(self, *ports: int) -> int:
        """From now on the bytes of open connections vanish, both ways, and nobody is told: of all, or of those with
        these ports in CLIENT LIST. Returns how many."""
        chosen = {one for one, port in self._open.items() if not ports or port in ports}
        self._swallowed |= chosen
        return len(chosen)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            self._open[connection] = far_writer.get_extra_info("sockname")[1]
            ways = [
                asyncio.create_task(self._pump(connection, source, sink))
                for source, sink in ((reader, far_writer), (far_reader, writer))
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._open.pop(connection, None)

    async def _pump(
        self, connection: asyncio.Task[None], source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if connection not in self._swallowed:
                    sink.write(data)
                    await sink.drain()

    async def close(self) -> None:
        for connection in list(self._open):
            connection.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=5)


@contextlib.asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()

"""A TCP proxy of ours between a client and a real server: refuse, cut off, or swallow bytes without a word.

It runs in a thread with an event loop of its own, so a client that blocks the test's loop while it connects is
served all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

__all__ = ["TcpProxy"]

T = TypeVar("T")


class TcpProxy:
    """`port` leads to `target`. Every method returns when it has taken effect."""

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self.target, self.host, self.port = target, host, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._swallow_new = False
        self.up()

    def up(self) -> None:
        """Take connections (again, on the same port)."""
        self._call(self._listen())

    def down(self) -> None:
        """Reset every connection and refuse new ones, as a server that was killed."""
        self._call(self._cut(refuse=True))

    def cut(self) -> None:
        """Reset every connection; new ones are served."""
        self._call(self._cut(refuse=False))

    def swallow(self, *, new: bool = False) -> None:
        """What present connections send, either way, goes nowhere, and nobody is told. `new`: later ones too."""

        async def mute() -> None:
            self._swallow_new = new
            for link in self._links:
                link.silent = True

        self._call(mute())

    def close(self) -> None:
        self._call(self._cut(refuse=True))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def connections(self) -> int:
        return len(self._links)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._swallow_new = False
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, self.host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self, *, refuse: bool) -> None:
        if refuse and self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._links):
            link.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_connection(self.host, self.target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link((writer, server[1]), silent=self._swallow_new)
        self._links.add(link)
        try:
            await asyncio.gather(link.pump(reader, server[1]), link.pump(server[0], writer))
        finally:
            self._links.discard(link)
            link.reset()


class _Link:
    def __init__(self, writers: tuple[asyncio.StreamWriter, ...], *, silent: bool) -> None:
        self.writers, self.silent = writers, silent

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if not self.silent:
                    sink.write(data)
                    await sink.drain()
            if not self.silent:  # a silent one does not tell the other side that this one hung up, either
                sink.close()

    def reset(self) -> None:
        for writer in self.writers:
            if raw := writer.get_extra_info("socket"):
                with contextlib.suppress(OSError):
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()


@pytest.fixture
def tcp_proxy() -> Iterator[Callable[[int], TcpProxy]]:
    """`tcp_proxy(port)`: a proxy in front of that port, gone when the test ends."""
    proxies: list[TcpProxy] = []

    def start(target: int) -> TcpProxy:
        proxies.append(TcpProxy(target))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()

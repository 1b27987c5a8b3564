"""A TCP proxy between a client and a real server: refuse, cut off, or silently swallow bytes.

Connections stay where they were made, as behind a load balancer or a DNS name: only new ones follow `target`.

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

T = TypeVar("T")


class TcpProxy:
    """`port` leads to `target`. Every method returns when it has taken effect."""

    def __init__(self, target: int, port: int = 0, host: str = "127.0.0.1") -> None:
        self.target, self.host, self.port = target, host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._swallow_new = False
        self.swallowed = 0  # bytes
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

    def swallow(self, *ports: int, new: bool = False) -> int:
        """Silently swallow what present connections send, either way: all of them, or those that the server sees with
        these ports. `new`: later ones too. Returns how many there are now."""

        async def mute() -> int:
            self._swallow_new = new
            chosen = [link for link in self._links if not ports or link.port in ports]
            for link in chosen:
                link.silent = True
            return len(chosen)

        return self._call(mute())

    def close(self) -> None:
        self._call(self._cut(refuse=True))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

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
            await asyncio.gather(self._pump(link, reader, server[1]), self._pump(link, server[0], writer))
        finally:
            self._links.discard(link)
            link.reset()

    async def _pump(self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if link.silent:
                    self.swallowed += len(data)
                    continue
                sink.write(data)
                await sink.drain()
            if not link.silent:  # a silent connection does not pass on a hang-up, either
                sink.close()


class _Link:
    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter], *, silent: bool) -> None:
        self.writers, self.silent = writers, silent
        self.port = writers[1].get_extra_info("sockname")[1]  # as the server sees it

    def reset(self) -> None:
        for writer in self.writers:
            if raw := writer.get_extra_info("socket"):
                with contextlib.suppress(OSError):
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()


@contextlib.contextmanager
def proxy_to(port: int, at: int = 0) -> Iterator[TcpProxy]:
    proxy = TcpProxy(port, at)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture
def tcp_proxy() -> Iterator[Callable[..., TcpProxy]]:
    """`tcp_proxy(port, at=0)`: a proxy in front of that port, gone when the test ends."""
    with contextlib.ExitStack() as proxies:
        yield lambda port, at=0: proxies.enter_context(proxy_to(port, at))

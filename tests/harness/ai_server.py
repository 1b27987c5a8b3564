"""A real HTTP server on loopback that speaks both AI protocols and misbehaves on request.

    async with AIServer() as server:
        server.will(Answer({"concepts": [], "links": []}), Reply(429, headers={"retry-after": "7"}), Hang())

Each request takes the next behaviour; when none is left the server answers 500, so a test that makes one call
too many fails. Every request is kept in `server.requests`.
"""

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Answer:
    """A good reply whose model output is `content` (JSON), or this very text if `content` is a string."""

    content: Any
    stop: str | None = None  # stop_reason or finish_reason, if not the usual one


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Raw:
    """These bytes as the body of a 200."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Hang:
    """Read the request, then say nothing until the client goes away."""


@dataclass(frozen=True, slots=True)
class Drip:
    """A good header, then one byte of the body at a time, forever."""

    every: float = 0.02


@dataclass(frozen=True, slots=True)
class Truncated:
    """Promise 1,000 bytes, send 100, close."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Reset the connection instead of answering."""


Behaviour = Answer | Reply | Raw | Hang | Drip | Truncated | Drop


@dataclass(frozen=True, slots=True)
class Recorded:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class AIServer:
    def __init__(self) -> None:
        self.requests: list[Recorded] = []
        self.left = asyncio.Event()  # a client went away while we were hanging or dripping
        self._script: deque[Behaviour] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def will(self, *behaviours: Behaviour) -> None:
        self._script.extend(behaviours)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True when the connection can take another request."""
        request = await _read_request(reader)
        self.requests.append(request)
        behaviour = self._script.popleft() if self._script else Reply(500, {"error": {"type": "off_script"}})
        match behaviour:
            case Answer(content, stop):
                await _send(writer, 200, json.dumps(_wrapped(request.path, content, stop)).encode())
            case Reply(status, body, headers):
                await _send(writer, status, json.dumps(body).encode(), headers)
            case Raw(body):
                await _send(writer, 200, body)
            case Hang():
                await reader.read(1)
                self.left.set()
                return False
            case Drip(every):
                await self._drip(writer, every)
                return False
            case Truncated():
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"{" + b" " * 99)
                await writer.drain()
                return False
            case Drop():
                # Linger zero: close sends RST, as a crashing server or a load balancer does.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
        return True

    async def _drip(self, writer: asyncio.StreamWriter, every: float) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        try:
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(every)
        except ConnectionError:
            self.left.set()


async def _read_request(reader: asyncio.StreamReader) -> Recorded:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Recorded(head[0].split(" ")[1], headers, json.loads(body or b"{}"))


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    lines = [f"HTTP/1.1 {status} Said", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    await writer.drain()


def _wrapped(path: str, content: Any, stop: str | None) -> dict[str, Any]:
    if path == "/v1/messages":
        block = (
            {"type": "text", "text": content}
            if isinstance(content, str)
            else {"type": "tool_use", "id": "t1", "name": "answer", "input": content}
        )
        return {"id": "m1", "type": "message", "content": [block], "stop_reason": stop or "tool_use"}
    text = content if isinstance(content, str) else json.dumps(content)
    message = {"role": "assistant", "content": text}
    return {"id": "c1", "choices": [{"index": 0, "message": message, "finish_reason": stop or "stop"}]}

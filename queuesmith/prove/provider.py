"""Played HTTP providers that misbehave: every call is logged with its time, key, effect and answer.

A `lost` answer has had its effect: the connection is cut afterwards. A request takes effect halfway through its
latency, even if the caller is gone, as with real providers. `429`, `500` and `hang` have no effect.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .processes import free_port
from .spec import Provider, Route, Wrong, fill_all
from .timeline import Timeline

SLOW, HANG = 6.0, 20.0
_MOST_BODY = 10 * 2**20
_REASONS = {200: "OK", 201: "Created", 202: "Accepted", 204: "No Content", 404: "Not Found", 429: "Too Many Requests"}


@dataclass
class Call:
    """One request. `subject`: what it is about; `idempotency`: the key that it carried."""

    at: float
    route: Route | None
    line: str
    subject: str
    key: str
    idempotency: str
    port: int
    answer: str = ""
    effect: bool = False
    done_at: float = 0.0

    @property
    def thing(self) -> str:
        """What may be made once for a job: `k1-0001/a` and `k1-0001/b` are two things if the file says so."""
        return self.subject if self.route and self.route.several else ""

    @property
    def failed(self) -> bool:
        """Did the caller get no good answer?"""
        return self.answer not in ("", "ok", "found", "not found")


@dataclass
class _Request:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    path: dict[str, str] = field(default_factory=dict)

    def pick(self, source: str) -> str:
        """`json:a.b`, `header:X`, `path:id`, `query:ref`, `form:ref` -> its value, or empty."""
        kind, _, name = source.partition(":")
        if not source:
            return ""
        if kind == "header":
            return self.headers.get(name.lower(), "")
        if kind == "path":
            return self.path.get(name, "")
        if kind in ("query", "form"):
            text = urlsplit(self.target).query if kind == "query" else self.body.decode(errors="replace")
            return next(iter(parse_qs(text).get(name, [])), "")
        value: Any = None
        with contextlib.suppress(ValueError):
            value = json.loads(self.body or b"null")
        for part in name.split(".") if name else []:
            value = value.get(part) if isinstance(value, dict) else None
        return "" if value is None else str(value)


class PlayedProvider:
    """Each of `scripts` may name the answer to a call; `on_effect(call)` is True if the caller is gone."""

    def __init__(
        self, provider: Provider, timeline: Timeline, seed: int, key_of: Callable[[str], str], scale: float
    ) -> None:
        self.name, self.port, self.calls = provider.name, free_port(), list[Call]()
        self._socket = socket.create_server(("127.0.0.1", self.port))
        self.scripts: list[Callable[[Call], str | None]] = []
        self.on_effect: Callable[[Call], bool] | None = None
        self.in_flight = 0
        self.linger = 0.0  # about how much longer every call takes, to be hit in the middle
        self._routes = [(route, _pattern(route.path)) for route in provider.routes]
        self._timeline, self._seed, self._key_of, self._scale = timeline, seed, key_of, scale
        self._applied: dict[tuple[str, str], float] = {}  # (route, idempotency key) -> when
        self._results: dict[tuple[str, str], Any] = {}
        self._made: dict[str, list[Any]] = {}  # subject, or idempotency key -> its answers
        self._tries: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"provider {self.name}", daemon=True)
        self._up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def effects(self, key: str) -> list[Call]:
        return [call for call in self.calls if call.effect and call.key == key]

    def unanswered(self, key: str) -> bool:
        """Did the caller never get the last answer for this key?"""
        calls = [call for call in self.calls if call.key == key]
        return bool(calls) and calls[-1].answer in ("lost", "cut")

    def counts(self) -> Counter[str]:
        """Key -> how often its most frequent effect was made."""
        counts = Counter[str]()
        made = Counter((call.key, call.thing) for call in self.calls if call.effect and call.key)
        for (key, _), count in made.items():
            counts[key] = max(counts[key], count)
        return counts

    def start(self) -> None:
        self._thread.start()
        if not self._up.wait(10):
            raise Wrong(f"provider {self.name} did not start within 10 s: is this machine overloaded? Run again")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket))
        self._up.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        try:
            while (request := await _read(reader, writer)) is not None:
                self.in_flight += 1
                try:
                    answer = await self._answer(request, port)
                finally:
                    self.in_flight -= 1
                if answer is None:
                    writer.transport.abort()
                    return
                writer.write(answer)
                await writer.drain()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: _Request, port: int) -> bytes | None:
        route = self._route(request)
        line = f"{request.method} {urlsplit(request.target).path}"
        subject = request.pick(route.effect or route.lookup) if route else ""
        key = self._key_of(subject) or self._key_of(f"{request.target} {request.body.decode(errors='replace')}")
        call = Call(
            self._timeline.now(), route, line, subject, key, request.pick(route.keyed_by) if route else "", port
        )
        self.calls.append(call)
        if route is None:
            return self._sent(call, "404", _response(404, {"error": f"no route for {line}"}))
        if route.lookup:
            results = self._made.get(subject, []) if subject else []
            if route.reply is not None:
                answer = _response(200, _listed(route.reply, results))
            else:
                answer = _response(200, results[-1]) if results else _response(404, {"error": "not found"})
            return self._sent(call, "found" if results else "not found", answer)
        call.answer = next(filter(None, (script(call) for script in self.scripts)), "ok")
        if call.answer == "mix":
            call.answer = self._mixed(route, call)
        return await self._perform(route, call)

    async def _perform(self, route: Route, call: Call) -> bytes | None:
        spread = random.Random(f"{self._seed} latency {call.subject} {len(self.calls)}")
        # Not equal: when the first ends, others must still be at work.
        pause = spread.uniform(*route.latency) + spread.uniform(0.4, 2) * self.linger
        if call.answer == "hang":
            await asyncio.sleep(HANG * self._scale)
            return self._sent(call, "no answer", None)
        if call.answer == "slow":
            pause += SLOW * self._scale
        await asyncio.sleep(pause / 2)
        if call.answer.isdigit():
            status = int(call.answer)
            headers = {"Retry-After": f"{route.retry_after:g}"} if status in (429, 503) else {}
            return self._sent(call, call.answer, _response(status, {"error": call.answer}, headers))
        result = self._apply(route, call)
        if self.on_effect is not None and call.effect and self.on_effect(call):
            call.answer, call.done_at = "cut", self._timeline.now()
            return None
        await asyncio.sleep(pause / 2)
        call.done_at = self._timeline.now()
        if call.answer == "lost":
            self._timeline.add("call", "its answer lost", call.key)
            return None
        return _response(route.status, result)

    def _apply(self, route: Route, call: Call) -> Any:
        known = (str(route), call.idempotency)
        fresh = time.monotonic() - self._applied.get(known, float("-inf")) < route.key_ttl
        if call.idempotency and fresh:
            self._timeline.add("call", f"{call.line} again under the same key, not repeated", call.key)
            return self._results[known]
        ident = f"{self.name}-{sum(past.effect for past in self.calls) + 1:05d}"
        values = {"id": ident, "subject": call.subject, "key": call.idempotency}
        result = {"id": ident, "status": "ok"} if route.reply is None else fill_all(route.reply, values)
        call.effect = bool(route.effect)
        self._results[known] = result
        # looked up by either
        for name in {call.subject, call.idempotency} - {""}:
            self._made.setdefault(name, []).append(result)
        self._applied[known] = time.monotonic()
        under = f" under key {call.idempotency[:40]}" if call.idempotency else ""
        self._timeline.add("call", f"{call.line} done{under}", call.key)
        return result

    def _mixed(self, route: Route, call: Call) -> str:
        """By seed, subject and number of the try: the same in every run, whatever the order of calls."""
        self._tries[call.subject] += 1
        at = random.Random(f"{self._seed} {self.name} {call.subject} {self._tries[call.subject]}").random()
        for answer, share in route.answers:
            at -= share
            if at < 0:
                return answer
        return "ok"

    def _sent(self, call: Call, text: str, answer: bytes | None) -> bytes | None:
        call.answer, call.done_at = text, self._timeline.now()
        self._timeline.add("call", f"{call.line} -> {text}", call.key)
        return answer

    def _route(self, request: _Request) -> Route | None:
        path = urlsplit(request.target).path
        for route, pattern in self._routes:
            if route.method == request.method and (match := pattern.fullmatch(path)):
                request.path = {name: unquote(value) for name, value in match.groupdict().items()}
                return route
        return None


def _listed(reply: Any, results: list[Any]) -> Any:
    """`{ data = ["{found}"] }` -> all that was found, in that place."""
    if isinstance(reply, Mapping):
        return {name: _listed(item, results) for name, item in reply.items()}
    if isinstance(reply, list):
        return [item for part in reply for item in (results if part == "{found}" else [_listed(part, results)])]
    return reply


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", path)
    return re.compile("".join(f"(?P<{part}>[^/]+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Request | None:
    head = await reader.readline()
    if not head.strip():
        return None
    method, target, _ = head.decode("latin-1").split(" ", 2)
    headers = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
            if len(body) > _MOST_BODY:
                raise ValueError("body too large")
        await reader.readline()
    else:
        body = await reader.readexactly(min(int(headers.get("content-length") or 0), _MOST_BODY))
    return _Request(method, target, headers, body)


def _response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> bytes:
    body = b"" if status == 204 else json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Error' if status >= 400 else 'OK')}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body

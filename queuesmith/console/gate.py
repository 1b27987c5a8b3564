"""Checks before every request: host, origin, secrets in the address, size, rate.

Plain ASGI, so that bodies are counted while they stream and responses stream through untouched.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from studyhall.patterns.core.job import correlation, new_correlation_id

from .problems import Problem, problem

READING = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_BODY = 64 * 1024
MAX_CLIENTS = 10_000
BODY_PAUSE, BODY_SECONDS = 20.0, 300.0  # between two pieces of a body, and for all of it
SECRET_NAMES = frozenset({"token", "access_token", "admin_token", "api_key", "apikey", "authorization", "bearer"})
SECURITY_HEADERS = {
    # The console is one page with its own script and style; nothing inline, nothing from elsewhere.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Gate:
    """`hosts`: the names it answers to, `*` for any. `rate`: requests per second and address that change something.
    `bodies`: paths that may take more than `MAX_BODY` bytes."""

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], rate: float = 50.0, bodies: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._bodies = bodies or {}
        self._hosts = {host.strip().lower() for host in hosts if host.strip()}
        self._rate = Rate(rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        with correlation(new_correlation_id()) as cid:

            async def with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    out = MutableHeaders(scope=message)
                    for name, value in SECURITY_HEADERS.items():
                        out.setdefault(name, value)
                    out.setdefault("Cache-Control", "no-store")
                    out["X-Correlation-Id"] = cid
                await send(message)

            try:
                self._check(scope, headers)
            except Problem as refused:
                answer = problem(refused.status_code, refused.slug, refused.detail, refused.headers)
                await answer(scope, receive, with_headers)
                return
            await self._app(scope, self._counted(scope, headers, receive), with_headers)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if "*" not in self._hosts and name not in self._hosts:
            # Another name for our address (DNS rebinding) would make a stranger's page same-origin with us.
            raise Problem(421, "unknown-host", "This host name is not served; see the setting of allowed hosts.")
        query = scope.get("query_string", b"").decode("latin-1")
        if any(key.lower() in SECRET_NAMES for key, _ in parse_qsl(query, keep_blank_values=True)):
            raise Problem(
                400,
                "token-in-url",
                "Addresses end up in logs and histories. Send the token as `Authorization: Bearer …`, and change it.",
            )
        if scope["method"] in READING:
            return
        origin = headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc.lower() != host
        if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise Problem(403, "cross-site", "Requests that change something must come from this site itself.")
        # The peer's address. A header that anybody can write counts only from a proxy that the settings trust.
        self._rate.check(scope["client"][0] if scope.get("client") else "")

    def _counted(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        limit = self._bodies.get(scope["path"], MAX_BODY)
        # Otherwise the client could go on sending, and we would go on discarding it.
        close = {"Connection": "close"}
        too_large = Problem(413, "too-large", f"The body is larger than {limit:,} bytes.", headers=close)
        too_slow = Problem(408, "too-slow", "The body came too slowly. Send it again.", headers=close)
        length = headers.get("content-length", "")
        got, ended, end = 0, False, time.monotonic() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal got, ended
            if length.isdigit() and int(length) > limit:
                raise too_large
            if ended:
                return await receive()  # waits until the connection ends
            try:
                async with asyncio.timeout(min(BODY_PAUSE, max(0.0, end - time.monotonic()))):
                    message = await receive()
            except TimeoutError:
                raise too_slow from None
            ended = not message.get("more_body", False)
            got += len(message.get("body", b""))
            if got > limit:  # a chunked body does not say how long it is
                raise too_large
            return message

        return counted


class Rate:
    """A token bucket per address, in this process. The workers keep the limit per user that all processes share."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self._rate, self._burst = rate, burst or 2 * rate
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when

    def wait(self, client: str, *, take: int = 1) -> float:
        """0: go. Else the seconds until the next token. `take=0` only looks."""
        now = time.monotonic()
        tokens, at = self._buckets.pop(client, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._rate)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - take if allowed else tokens, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self._rate

    def check(self, client: str, *, take: int = 1) -> None:
        if (wait := self.wait(client, take=take)) > 0:
            raise Problem(
                429,
                "too-many-requests",
                "Too many requests from this address. Try again after the time in Retry-After.",
                headers={"Retry-After": str(math.ceil(wait))},
            )

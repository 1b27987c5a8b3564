"""The edge of the service: checks of every request, and what a client sees of an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib.util import find_spec

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .patterns.core.errors import FailedTwin, QueueUnavailable, Transient
from .patterns.idempotency import KeyReused
from .settings import PREFIX, Settings, SettingsError

__all__ = ["caller", "console_at", "guard"]

MAX_BODY = 64 * 1024
BODY_SECONDS = 30.0
PROBES = ("/healthz", "/readyz")
STATUS = {
    KeyReused: 422,
    FailedTwin: 409,
    QueueUnavailable: 503,
    Transient: 503,
    InterfaceError: 503,
    OperationalError: 503,
}


def caller(request: Request) -> str:
    """Who owns the `Idempotency-Key`: put your login's user here; until then, the credential or address."""
    return request.headers.get("authorization") or (request.client.host if request.client else "")


def guard(api: FastAPI, settings: Settings, body: type[BaseModel]) -> None:
    """Nothing reaches `api` unchecked, and no error repeats what was sent."""
    if settings.admin_token and find_spec("queuesmith") is None:
        raise SettingsError(f"{PREFIX}ADMIN_TOKEN: the console needs pip install -e '.[console]'")
    known = {"body", "header", "path", "idempotency-key", *body.model_fields}

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        faults = []
        for fault in error.errors()[:20]:
            # Where and why, never what: an unknown field's name is input too.
            where = [str(part) if part in known or isinstance(part, int) else "*" for part in fault["loc"]]
            faults.append({"at": ".".join(where), "message": str(fault["type"])})
        return JSONResponse({"detail": "the request does not fit", "errors": faults}, status_code=422)

    async def known_error(_: Request, error: Exception) -> JSONResponse:
        status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
        ours = not isinstance(error, InterfaceError | OperationalError)
        detail = str(error) if ours else "The database does not answer. Try again soon."
        return JSONResponse({"detail": detail}, status, {"Retry-After": "2"} if status == 503 else {})

    api.add_exception_handler(RequestValidationError, invalid)
    for kind in STATUS:
        api.add_exception_handler(kind, known_error)
    api.add_middleware(Gate, hosts=settings.hosts)


@asynccontextmanager
async def console_at(api: FastAPI, settings: Settings, redis_url: str) -> AsyncIterator[None]:
    """The operator's console at /console, if there is an admin token: queues, jobs, workers, what the store keeps."""
    if not settings.admin_token:
        yield
        return
    from queuesmith.console import console

    made = console(
        redis_url,
        token=settings.admin_token,
        database=settings.store_url,
        hosts=settings.hosts,
        name="{@ project_name @}",
        adds=False,  # jobs are signed by the API
    )
    api.mount("/console", made)
    async with made.router.lifespan_context(made):
        yield


class Gate:
    """Plain ASGI, so that a body is counted while it arrives and an event stream passes untouched."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        # Another name for our address (DNS rebinding) would make a stranger's page same-origin with us. Probes call
        # by address, and learn nothing but whether we are ready.
        if "*" not in self._hosts and name not in self._hosts and scope["path"] not in PROBES:
            refused = JSONResponse({"detail": "this host name is not served, see ALLOWED_HOSTS"}, 421)
            await refused(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                out["X-Content-Type-Options"] = "nosniff"
                out.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, _counted(headers, receive), answer)


def _counted(headers: Headers, receive: Receive) -> Receive:
    # Otherwise the client could go on sending, and we would go on discarding it.
    close = {"Connection": "close"}
    too_large = HTTPException(413, f"the body is larger than {MAX_BODY:,} bytes", close)
    too_slow = HTTPException(408, "the body came too slowly", close)
    announced = headers.get("content-length", "")
    got, ended, deadline = 0, False, asyncio.get_running_loop().time() + BODY_SECONDS

    async def counted() -> Message:
        nonlocal got, ended
        if announced.isdecimal() and int(announced) > MAX_BODY:
            raise too_large
        if ended:
            return await receive()  # waits until the connection ends
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise too_slow from None
        ended = not message.get("more_body", False)
        got += len(message.get("body", b""))
        if got > MAX_BODY:  # a chunked body does not say how long it is
            raise too_large
        return message

    return counted

"""Every error of the API is `application/problem+json` (RFC 9457): what happened and what to do next."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from studyhall.patterns.cancel import NoSuchJob
from studyhall.patterns.core.errors import (
    FailedTwin,
    Overloaded,
    Permanent,
    QueueUnavailable,
    RateLimited,
    ResourceBusy,
    Transient,
)
from studyhall.patterns.core.job import current_correlation_id
from studyhall.patterns.core.redaction import redact_text
from studyhall.patterns.core.store import StoreUnavailable
from studyhall.patterns.dead_letter import (
    AlreadyReplayed,
    ChildrenFirst,
    NotDeadLetter,
    NothingToReplay,
    ReplayRunning,
    UnknownDeadLetter,
)
from studyhall.patterns.idempotency import KeyReused
from studyhall.patterns.saga import UnknownSaga
from studyhall.patterns.saga.repair import CannotRepair

log = logging.getLogger("console.api")
MEDIA_TYPE = "application/problem+json"
CONFLICTS = (AlreadyReplayed, ChildrenFirst, NotDeadLetter, NothingToReplay, CannotRepair, FailedTwin)

# What an error class means to a client. The first match counts, so the more specific come first.
Meaning = tuple[type[Exception] | tuple[type[Exception], ...], int, str]
MEANINGS: tuple[Meaning, ...] = (
    (Overloaded, 503, "overloaded"),
    (ReplayRunning, 409, "replay-running"),
    ((RateLimited, ResourceBusy), 503, "busy"),
    (QueueUnavailable, 503, "queue-unavailable"),
    ((NoSuchJob, UnknownDeadLetter, UnknownSaga), 404, "not-found"),
    (CONFLICTS, 409, "conflict"),
    (KeyReused, 422, "key-reused"),
    (Permanent, 422, "refused"),
    ((Transient, RedisError, DBAPIError, TimeoutError, ConnectionError), 503, "unavailable"),
)
INNER = (RedisError, DBAPIError, StoreUnavailable, OSError)  # their words name hosts, files and statements
TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Not possible in this state",
    413: "Too large",
    415: "Unsupported type",
    421: "Unknown host",
    422: "Cannot be processed",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available now",
}


class Problem(HTTPException):
    """Raise it where no error class of a pattern fits."""

    def __init__(
        self, status: int, slug: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(status, detail, dict(headers) if headers else None)
        self.slug, self.more = slug, more


def problem(status: int, slug: str, detail: str, headers: Mapping[str, str] | None = None, **more: Any) -> JSONResponse:
    body = {
        "type": f"urn:queuesmith:problem:{slug}",
        "title": TITLES.get(status, "Error"),
        "status": status,
        "detail": detail,
        "correlation_id": current_correlation_id() or None,
        **more,
    }
    return JSONResponse(body, status, dict(headers or {}), MEDIA_TYPE)


def install(api: FastAPI, meanings: Sequence[Meaning] = MEANINGS) -> None:
    """Turn every exception of a request into a problem."""

    @api.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        slug = error.slug if isinstance(error, Problem) else TITLES.get(error.status_code, "error")
        more = error.more if isinstance(error, Problem) else {}
        return problem(error.status_code, slug.lower().replace(" ", "-"), str(error.detail), error.headers, **more)

    @api.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Where and why, never what: the input may hold a secret.
        faults = [
            {"at": ".".join(map(str, fault["loc"])), "message": str(fault["msg"])} for fault in error.errors()[:20]
        ]
        return problem(422, "invalid", "The request does not fit; see errors.", errors=faults)

    @api.exception_handler(Exception)
    async def known(_: Request, error: Exception) -> JSONResponse:
        return problem_of(error, meanings)

    for kinds, *_rest in meanings:
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            # By class: a handler for Exception answers as a server error, which ends the connection.
            api.add_exception_handler(kind, known)


def problem_of(error: Exception, meanings: Sequence[Meaning] = MEANINGS) -> JSONResponse:
    if isinstance(error, ClientDisconnect):
        return problem(400, "client-gone", "the client went away")
    for kinds, status, slug in meanings:
        if isinstance(error, kinds):
            wait = getattr(error, "retry_after", 2.0 if status == 503 else None)
            headers = {"Retry-After": str(max(1, math.ceil(wait)))} if wait is not None else {}
            inner = isinstance(error, INNER) and not isinstance(error, Permanent)
            detail = "A server behind this does not answer. Try again soon." if inner else redact_text(str(error))
            if status >= 500:
                log.warning("not available", extra={"fields": {"problem": slug, "error": type(error).__name__}})
            return problem(status, slug, detail, headers)
    log.error("a request failed", exc_info=error)
    return problem(500, "internal", "Internal error; find it in the log by its correlation id.")

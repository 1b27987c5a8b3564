"""What the endpoints share: the open app and the helpers of this process, and who is asking."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from studyhall.app import App
from studyhall.patterns.deferred_reply import DeferredReplies
from studyhall.patterns.in_process_tasks import Tasks
from studyhall.patterns.progress_stream import ProgressStream
from studyhall.patterns.request_dedup import RequestDedup
from studyhall.patterns.wait_for_result import Results

from .gate import Rate
from .problems import Problem

__all__ = ["Admin", "ApiState", "Caller", "Client", "RequestKey", "State", "Streams"]


HISTORY = 180  # samples of the queues, five seconds apart: a quarter of an hour


@dataclass(slots=True)
class ApiState:
    app: App
    stream: ProgressStream
    results: Results
    tasks: Tasks
    uploads: RequestDedup
    orders: RequestDedup
    replies: DeferredReplies
    streams: Streams
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=HISTORY))  # for charts
    # Ten guesses, then one every 6 s.
    wrong_tokens: Rate = field(default_factory=lambda: Rate(1 / 6, burst=10))
    replays: dict[str, dict[str, Any]] = field(default_factory=dict)  # what `replay many` did, the last few


class Streams:
    """Counts the open event streams: each holds a connection for as long as its reader likes."""

    def __init__(self, most: int, each: int) -> None:
        self._most, self._each = most, each
        self._open: Counter[str] = Counter()
        self.stopping = asyncio.Event()  # set when the process is told to stop: streams end

    def open(self, client: str) -> None:
        if self._open.total() >= self._most or self._open[client] >= self._each:
            raise Problem(
                503,
                "too-many-streams",
                "Too many event streams are open. Close some, or try again later.",
                headers={"Retry-After": "10"},
            )
        self._open[client] += 1

    def close(self, client: str) -> None:
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


def _client(request: Request) -> str:
    """The peer's address, or the one that a trusted proxy names."""
    return request.client.host if request.client else ""


def _state(request: Request) -> ApiState:
    state: ApiState = request.app.state.studyhall
    return state


def _caller(
    x_user: Annotated[
        str,
        Header(
            pattern=r"^[A-Za-z0-9._@-]{1,100}$",
            description="Who is asking. StudyHall has no accounts: let the proxy that signs people in set this.",
        ),
    ] = "you",
) -> str:
    return x_user


_bearer = HTTPBearer(auto_error=False, description="STUDYHALL_ADMIN_TOKEN")


def _admin(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str:
    """A header, never a cookie or an address: no other site can make a browser send it."""
    state, client = _state(request), _client(request)
    token = state.app.settings.admin_token
    if not token:
        raise Problem(403, "admin-off", "Admin is off. Set STUDYHALL_ADMIN_TOKEN and restart to turn it on.")
    # Asked first, so that who is guessing does not learn from it when a guess was right.
    state.wrong_tokens.check(client, take=0)
    if given is None or not hmac.compare_digest(given.credentials.encode(), token.encode()):
        state.wrong_tokens.wait(client, take=1 if given else 0)
        raise Problem(
            401,
            "wrong-token",
            "Send the admin token as `Authorization: Bearer …`.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return "admin"


State = Annotated[ApiState, Depends(_state)]
Caller = Annotated[str, Depends(_caller)]
Client = Annotated[str, Depends(_client)]
Admin = Annotated[str, Depends(_admin)]
RequestKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=200,
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Same key, same body: the first answer again, nothing done twice. Same key, other body: 422.",
    ),
]

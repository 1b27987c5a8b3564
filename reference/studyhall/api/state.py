"""What the endpoints share: the open app and the helpers of this process, and who is asking."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request

from studyhall.app import App
from studyhall.patterns.deferred_reply import DeferredReplies
from studyhall.patterns.in_process_tasks import Tasks
from studyhall.patterns.progress_stream import ProgressStream
from studyhall.patterns.request_dedup import RequestDedup
from studyhall.patterns.wait_for_result import Results

from .problems import Problem


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


Api = Annotated[ApiState, Depends(_state)]
Caller = Annotated[str, Depends(_caller)]
Client = Annotated[str, Depends(_client)]
RequestKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=200,
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Same key, same body: the first answer again, nothing done twice. Same key, other body: 422.",
    ),
]

"""What the console's endpoints share: the server, the store if there is one, which queues, and who is asking."""

import asyncio
import hmac
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Depends, Path, Request
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials
from pydantic import BeforeValidator
from redis.exceptions import ResponseError
from sqlalchemy import inspect
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.redaction import redact_text
from studyhall.patterns.core.store import read
from studyhall.patterns.in_process_tasks import Tasks
from studyhall.patterns.producer import Producer

from .gate import Rate
from .problems import Problem

HISTORY = 180  # samples of the queues, five seconds apart: a quarter of an hour
LOOK_AGAIN = 3.0  # seconds between scans for new queues, more if scanning takes long
FIRST_LOOK = 0.2  # seconds that a request waits for the first scan of a large server
MOST_QUEUES = 500
SECONDS = 5.0  # for a command of the console, the slowest of several
LISTS = ("active", "wait", "paused")
# In the order in which an operator wants to see them.
STATES = (*LISTS, "prioritized", "delayed", "waiting-children", "failed", "completed")
KINDS = {**dict.fromkeys(STATES, "zset"), **dict.fromkeys(LISTS, "list"), "repeat": "zset", "meta": "hash"}

QUEUE = r"^[^\x00-\x1f:]{1,200}$"
# Quoted twice by the page: a slash in a name would otherwise split the path.
QueueName = Annotated[str, BeforeValidator(unquote), Path(pattern=QUEUE)]
JobId = Annotated[str, BeforeValidator(unquote), Path(pattern=r"^[^\x00-\x1f]{1,200}$")]


@dataclass(slots=True)
class Console:
    """`queues`: those to show; None: found by their keys. `adds`: whether jobs can be added here; not useful where
    workers refuse what the service has not signed."""

    producer: Producer
    token: str
    store: AsyncEngine | None = None
    queues: Sequence[str] | None = None
    adds: bool = True
    token_name: str = "the token that the console was started with"
    tasks: Tasks = field(default_factory=Tasks)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=HISTORY))  # for charts
    # Ten guesses, then one every 6 s.
    wrong_tokens: Rate = field(default_factory=lambda: Rate(1 / 6, burst=10))
    running: dict[str, dict[str, Any]] = field(default_factory=dict)  # actions on many jobs, the last few
    _tables: frozenset[str] | None = None
    _found: list[str] = field(default_factory=list)
    _look_at: float = 0.0
    _looking: asyncio.Task[None] | None = None

    @property
    def redis(self) -> Any:
        """redis-py types every answer as text or bytes; ours are decoded."""
        return self.producer.redis

    def key(self, queue: str, *parts: str) -> str:
        return ":".join((self.producer.prefix, queue, *parts))

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Redis answers in time, or the request ends with `QueueUnavailable`."""
        try:
            async with self.producer.bounded(SECONDS):
                yield
        except QueueUnavailable as error:
            if error.__cause__ is None:  # not from the connection: it has its own words
                raise
            words = "Redis does not answer. What is shown of its queues may be old."
            if isinstance(error.__cause__, ResponseError):  # it does, and says why not
                words = f"Redis refused: {redact_text(str(error.__cause__))}"
            raise QueueUnavailable(words) from error

    def database(self) -> AsyncEngine:
        if self.store is None:
            raise Problem(404, "no-database", "The console was started without a database: --database URL.")
        return self.store

    async def tables(self) -> frozenset[str]:
        """Of the database: they decide which views are shown."""
        if self.store is None:
            return frozenset()
        if self._tables is None:
            async with read(self.store) as connection:
                names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
            self._tables = frozenset(names)
        return self._tables

    async def names(self) -> list[str]:
        """The queues. Millions of keys are scanned in the background; the answer has those found so far."""
        if self.queues is not None:
            return list(self.queues)
        if self._looking is None and time.monotonic() > self._look_at:
            self._looking = asyncio.create_task(self._look(), name="look for queues")
        if (looking := self._looking) is not None:
            await asyncio.wait({looking}, timeout=FIRST_LOOK)
            if looking.done():
                self._looking = None
                looking.result()  # QueueUnavailable, if Redis is down
        return self._found

    async def known(self, queue: str) -> str:
        """The queue, or a problem that says there is none. Looks at its own key: it may be new."""
        if self.queues is None:
            async with self.bounded():
                there = bool(await self.redis.exists(self.key(queue, "meta")))
            if there and queue not in self._found:
                self._found = sorted([*self._found, queue])
        else:
            there = queue in self.queues
        if not there:
            raise Problem(404, "not-found", f"There is no queue {queue!r} here.")
        return queue

    async def readable(self, parts: Sequence[str], queue: str | None = None) -> tuple[list[str], dict[str, str]]:
        """The queues, or this one, whose `parts` are what BullMQ makes them; of the others, why not."""
        names = [await self.known(queue)] if queue else await self.names()
        odd: dict[str, str] = {}
        pairs = [(name, part) for name in names for part in parts]
        async with self.bounded(), self.redis.pipeline(transaction=False) as pipe:
            for pair in pairs:
                pipe.type(self.key(*pair))
            for (name, part), kind in zip(pairs, await pipe.execute(), strict=True):
                if kind not in ("none", KINDS[part]):
                    odd[name] = f"{part} is a {kind}, not a {KINDS[part]}"
        return [name for name in names if name not in odd], odd

    async def _look(self) -> None:
        # Every queue that was ever added to has this key. A step of 2,000 keys blocks the server for about 1 ms.
        start, end = f"{self.producer.prefix}:", ":meta"
        match = re.sub(r"([*?\[\]\\])", r"\\\1", start) + "*" + end
        names: set[str] = set()
        began = time.monotonic()
        cursor = None
        while cursor != 0 and len(names) < MOST_QUEUES:
            async with self.bounded():
                cursor, keys = await self.redis.scan(cursor or 0, match=match, count=2_000)
            names |= {name for key in keys if ":" not in (name := key[len(start) : -len(end)])}
            self._found = sorted(names | set(self._found))
        self._found, ended = sorted(names), time.monotonic()
        self._look_at = ended + max(LOOK_AGAIN, 3 * (ended - began))


async def hashes(pipe: Any, nothing: Any) -> list[Any]:
    """The answers of a pipeline, `nothing` for a key that is no hash."""
    answers = await pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
            raise answer
    return [nothing if isinstance(answer, Exception) else answer for answer in answers]


def number(text: str | None) -> float | None:
    """None: there is none, or it is not one."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _state(request: Request) -> Console:
    state: Console = request.app.state.console
    return state


_bearer = HTTPBearer(auto_error=False, description="the admin token")


def _admin(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str:
    """A header, never a cookie or an address: no other site can make a browser send it."""
    console, client = _state(request), request.client.host if request.client else ""
    if not console.token:
        raise Problem(403, "admin-off", f"Admin is off. Set {console.token_name} and restart to turn it on.")
    # Checked first, so that someone guessing does not learn from it that a guess was right.
    console.wrong_tokens.check(client, take=0)
    if given is None or not hmac.compare_digest(given.credentials.encode(), console.token.encode()):
        console.wrong_tokens.wait(client, take=1 if given else 0)
        raise Problem(
            401,
            "wrong-token",
            "Send the admin token as `Authorization: Bearer …`.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return "admin"


State = Annotated[Console, Depends(_state)]
Admin = Annotated[str, Depends(_admin)]

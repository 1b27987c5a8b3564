"""Live progress for any number of clients: Server-Sent Events fed by the queues' own event streams.

Promise: a client that reconnects with the last id it saw (`Last-Event-ID`, which browsers send by themselves)
gets every event since, once and in order, from any instance of the server: an id is a position in
Redis, not in our memory. One reader serves all clients of a process, and memory does not grow with them: events
are held once, in a ring of `memory` entries, and a client too slow for it reads on from Redis. Polling every
100 ms instead costs each client ten requests a second and misses what happens in between.

When it does NOT hold: BullMQ keeps about 10,000 events per queue. A client that was away for longer, or a Redis
that lost its data, gets a `gap` event: load the state again, then go on. Progress is thinned before it gets here
(see `progress`). Fields may hold results and reasons: pass on only what that client may see.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from .core.worker_connections import blocking_client

__all__ = ["GAP", "IDLE", "JobEvent", "ProgressStream", "sse"]

log = logging.getLogger("progress_stream")
BLOCK = 2_000  # ms that one read waits for news
PAGE = 200
MAX_CURSOR = 4_000  # characters of a Last-Event-ID; anybody can send one
GAP, IDLE = "gap", "idle"
ENDS = frozenset({"completed", "failed", "removed"})
Position = tuple[int, int]  # of a stream entry: milliseconds, number within
Cursor = dict[str, Position]  # queue -> the last one seen
START: Position = (0, 0)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`name` is BullMQ's (added, active, progress, completed, failed, …), or GAP, or IDLE: nothing new."""

    queue: str
    name: str
    job_id: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    position: Position = START
    cursor: str = ""  # to be sent as `id:`; resumes after this event

    @property
    def at(self) -> float:
        """Seconds since 1970, by the clock of Redis."""
        return self.position[0] / 1000

    @property
    def progress(self) -> dict[str, Any]:
        try:
            data = json.loads(self.fields.get("data", ""))
        except ValueError:
            return {}
        return data if isinstance(data, dict) else {}


class ProgressStream:
    """One per process, with `run()` in a task; then any number of `events()` and `ending()`."""

    def __init__(self, url: str, queues: Iterable[str], *, prefix: str = "bull", memory: int = 2_000) -> None:
        self.queues = tuple(sorted(queues))
        self._prefix = prefix
        self._client: Redis = blocking_client(url)
        self._ring: deque[JobEvent] = deque(maxlen=memory)
        self._read = 0  # events ever put into the ring; the ring ends there
        self._at: Cursor = {}
        self._news = asyncio.Condition()
        self._started = asyncio.Event()
        self._ending: dict[tuple[str, str], set[asyncio.Event]] = {}
        self.catch_ups = 0  # how often a client read from Redis instead of from the ring

    async def run(self) -> None:
        """Read until cancelled. An outage of Redis is waited out; what it still has is not missed."""
        pause, task = 0.1, asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        try:
            # Asked for, because a cancellation can vanish inside redis-py (seen on 3.11).
            while task is None or task.cancelling() <= before:
                try:
                    await self._read_once()
                    pause = 0.1
                except (RedisError, OSError) as error:
                    log.warning("the event streams do not answer: %s", type(error).__name__)
                    await asyncio.sleep(pause)
                    pause = min(1.0, pause * 2)
        finally:
            await self._client.aclose()

    async def ready(self) -> None:
        """Returns once everything from now on will be seen."""
        await self._started.wait()

    async def events(
        self, last_id: str | None = None, *, queues: Iterable[str] | None = None, idle: float = 15.0
    ) -> AsyncIterator[JobEvent]:
        """Events after `last_id`, or from now on. IDLE after this many quiet seconds: a heartbeat."""
        wanted = self.queues if queues is None else tuple(q for q in self.queues if q in set(queues))
        await self.ready()
        seen, number = dict(self._at), self._read  # read together: no event falls between the two
        if last_id is not None:
            async for event in self._catch_up(_parse(last_id, wanted), seen, wanted):
                yield event
        while True:
            first = self._read - len(self._ring)
            if number < first:  # too slow: what we did not see has left the ring
                until, number = dict(self._at), self._read
                async for event in self._catch_up(seen, until, wanted):
                    yield event
                seen = until
                continue
            batch = [self._ring[index - first] for index in range(number, self._read)]
            number = self._read
            for event in batch:
                if event.name == GAP:
                    seen[event.queue] = START
                elif event.position <= seen.get(event.queue, START):
                    continue
                else:
                    seen[event.queue] = event.position
                if event.queue in wanted:
                    yield _pointing(event, seen, wanted)
            if not batch and not await self._news_after(number, idle):
                yield _pointing(JobEvent("", IDLE), seen, wanted)

    @contextlib.contextmanager
    def ending(self, queue: str, job_id: str) -> Iterator[asyncio.Event]:
        """Set when the job ends while we are inside. It may have ended before: look, after entering."""
        key, flag = (queue, job_id), asyncio.Event()
        self._ending.setdefault(key, set()).add(flag)
        try:
            yield flag
        finally:
            self._ending[key].discard(flag)
            if not self._ending[key]:
                del self._ending[key]

    async def _news_after(self, number: int, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self._read > number)
                return True
        return False

    async def _catch_up(self, since: Cursor, until: Cursor, wanted: Iterable[str]) -> AsyncIterator[JobEvent]:
        """What Redis holds after `since`, up to `until`; what it no longer holds is reported as a gap."""
        self.catch_ups += 1
        cursor = {**until, **since}
        pages: dict[str, deque[JobEvent]] = {queue: deque() for queue in wanted if queue in since}
        for queue in pages:
            if await self._lost(queue, since[queue]):
                cursor[queue] = START
                yield _pointing(JobEvent(queue, GAP), cursor, wanted)
        unread = set(pages)
        while True:
            for queue in sorted(unread):  # a page of each, so that the oldest of all goes first
                if not pages[queue]:
                    end = until.get(queue, START)
                    rows: Any = await self._client.xrange(
                        self._key(queue), f"({_text(cursor[queue])}", _text(end), PAGE
                    )
                    pages[queue].extend(_event(queue, _position(ident), fields) for ident, fields in rows)
                    if len(rows) < PAGE:
                        unread.discard(queue)
            heads = [(page[0].position, queue) for queue, page in pages.items() if page]
            if not heads:
                return
            event = pages[min(heads)[1]].popleft()
            cursor[event.queue] = event.position
            yield _pointing(event, cursor, wanted)

    async def _lost(self, queue: str, position: Position) -> bool:
        """Was something after this position trimmed, or is it from a Redis whose data is gone?"""
        if position == START:
            return False
        first: Any = await self._client.xrange(self._key(queue), count=1)
        return not first or position < _position(first[0][0]) or position > await self._last(queue)

    async def _last(self, queue: str) -> Position:
        last: Any = await self._client.xrevrange(self._key(queue), count=1)
        return _position(last[0][0]) if last else START

    async def _read_once(self) -> None:
        for queue in set(self.queues) - set(self._at):
            self._at[queue] = await self._last(queue)
        self._started.set()
        streams: Any = {self._key(queue): _text(self._at[queue]) for queue in self.queues}
        entries: Any = await self._client.xread(streams, count=PAGE, block=BLOCK)
        fresh = [
            _event(queue, _position(ident), fields)
            for key, rows in (entries.items() if isinstance(entries, dict) else entries or ())
            for queue in (key.removeprefix(f"{self._prefix}:").removesuffix(":events"),)
            for ident, fields in (rows[0] if rows and isinstance(rows[0], list) else rows)
        ]
        if not fresh:
            # A Redis that came back empty, or whose clock was set back, may never reach our positions again.
            fresh = [JobEvent(q, GAP) for q, at in self._at.items() if at > await self._last(q)]
        async with self._news:
            for event in sorted(fresh, key=lambda event: event.position):
                self._at[event.queue] = event.position
                self._ring.append(event)
                self._read += 1
                if event.name in ENDS:
                    for flag in self._ending.get((event.queue, event.job_id), ()):
                        flag.set()
            self._news.notify_all()

    def _key(self, queue: str) -> str:
        return f"{self._prefix}:{queue}:events"


def sse(event: str, data: object, ident: str = "") -> str:
    """One event in the wire format. JSON has no line breaks of its own."""
    head = f"id: {ident}\n" if ident else ""
    return f"{head}event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _event(queue: str, position: Position, fields: Mapping[str, str]) -> JobEvent:
    return JobEvent(queue, fields.get("event", ""), fields.get("jobId", ""), fields, position)


def _pointing(event: JobEvent, cursor: Cursor, wanted: Iterable[str]) -> JobEvent:
    return replace(event, cursor=",".join(f"{queue}:{_text(cursor.get(queue, START))}" for queue in wanted))


def _parse(cursor: str, wanted: Iterable[str]) -> Cursor:
    """What a client sends back is anybody's text: take the positions of queues we know, leave the rest."""
    pairs = re.findall(r"(?:^|,)([^,:]+):(\d{1,15}-\d{1,15})(?=,|$)", cursor[:MAX_CURSOR])
    known = set(wanted)
    return {queue: _position(at) for queue, at in pairs if queue in known}


def _position(ident: str) -> Position:
    milliseconds, _, number = ident.partition("-")
    return int(milliseconds), int(number)


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"

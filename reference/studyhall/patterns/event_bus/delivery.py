"""Shared by all event-bus adapters: one verdict on one delivery, and work in lanes.

Promise: `judge` turns whatever a handler does (return, raise, hang, cancel itself, get garbage) into exactly
one decision, the same on every broker; `Lanes` runs work with one key strictly in the order it was started.

When it does NOT hold: a handler that blocks the event loop (a CPU loop, a synchronous driver) escapes any
time limit; put such work into a thread or process.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

from ..core.event import MAX_BYTES, Event, EventTooLarge, Handler, topic_of
from ..core.failures import clean_text
from ..core.job import Decision, Outcome, RetryPolicy
from ..core.redaction import redact_text
from ..retry import decide

__all__ = [
    "Lanes",
    "checked_name",
    "encoded",
    "judge",
    "log",
    "partition_of",
    "pauses",
    "report_trimmed",
    "set_within",
    "text",
    "wire_id",
]

log = logging.getLogger("event_bus")
_ORDINARY = re.compile(r"[A-Za-z0-9._:=-]{1,200}")


def report_trimmed(where: str, group: str, lost: int) -> None:
    again = "publish that range again from the outbox"
    log.error("%d events of %s were trimmed before %s had handled them: %s", lost, where, group, again)


async def judge(
    handler: Handler, body: bytes | str, deliveries: int, policy: RetryPolicy, time_limit: float
) -> Decision | None:
    """Run the handler once. None: acknowledge. `delay` None: quarantine with `reason`. Else: again later."""
    if deliveries > policy.attempts:  # the earlier ones ended without an answer: it kills its consumer
        died = f"delivered {deliveries - 1} times and never answered: its consumer died or hung"
        return Decision(Outcome.EXHAUSTED, died)
    event: Event | None = None
    # Before Python 3.13 a failed TaskGroup of an earlier handler leaves this task marked as cancelled.
    task = asyncio.current_task()
    marked = task.cancelling() if task else 0
    try:
        event = Event.decode(body)
        async with asyncio.timeout(time_limit):
            await handler(event)
        return None
    except asyncio.CancelledError as error:
        if task is None or task.cancelling() > marked:
            raise
        failure: BaseException = error  # the handler's own: it must not end the consumer
    except Exception as error:
        failure = error
    age = (datetime.now(UTC) - event.time).total_seconds() if event and event.time.tzinfo else 0.0
    verdict = decide(failure, policy, deliveries - 1, age=max(age, 0.0))
    if verdict.outcome is Outcome.CANCELLED:  # final, and not a failure
        return None
    return replace(verdict, reason=clean_text(redact_text(verdict.reason)))


def checked_name(word: str) -> str:
    """Topic and group names become parts of keys, queue names and subjects: only what is legal everywhere."""
    if not word or not all(c.isascii() and (c.isalnum() or c in "-_") for c in word):
        raise ValueError(f"{word!r} is not a valid topic or group name: use letters, digits, '-' and '_'")
    return word


def wire_id(event: Event) -> str:
    """The event's id as every broker takes it: an ordinary one as it is, any other as a hash.

    NATS strips blanks from headers, so that "a " was dropped as a repeat of "a"; RabbitMQ takes 255 bytes, and 200
    characters can have 800. No ordinary id contains "~" or "/", which mark hashes and the buses' own ids.
    """
    if _ORDINARY.fullmatch(event.id):
        return event.id
    return f"~{hashlib.sha256(event.id.encode()).hexdigest()}"


def partition_of(key: str, partitions: int) -> int:
    """The same in every process and release: `hash()` is salted per process."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % partitions


def encoded(event: Event) -> bytes | Exception:
    """The wire form, or why the event is refused before it reaches the broker."""
    try:
        checked_name(topic_of(event))
        raw = event.encode()
    except ValueError as error:
        return error
    if len(raw) > MAX_BYTES:
        return EventTooLarge(f"{event.type} has {len(raw)} bytes, limit {MAX_BYTES}: send a reference instead")
    return raw


def text(raw: bytes | str | None) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""


class Lanes:
    """Work in flight: everything with the same key one after another, everything else side by side."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._last: dict[str, asyncio.Task[None]] = {}

    def start(self, key: str | None, work: Callable[[], Awaitable[None]]) -> None:
        before = self._last.get(key) if key is not None else None
        task = asyncio.create_task(self._run(before, work))
        self.tasks.add(task)
        if key is not None:
            self._last[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    async def drain(self) -> None:
        while self.tasks:
            await asyncio.wait(set(self.tasks))

    async def abort(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await self.drain()

    async def _run(self, before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
        if before is not None:
            await asyncio.wait({before})
        await work()

    def _ended(self, key: str | None, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if key is not None and self._last.get(key) is task:
            del self._last[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("event bus work ended with %r: the broker will deliver it again", error, exc_info=error)


async def pauses(stop: asyncio.Event, *, longest: float = 2.0) -> AsyncIterator[None]:
    """`async for _ in pauses(stop): try to work`: 50 ms after the first failure, doubling to `longest`, and from
    50 ms again after a turn that lasted longer than that. Ends as soon as `stop` is set."""
    wait = 0.05
    while not stop.is_set():
        began = time.monotonic()
        yield
        wait = 0.05 if time.monotonic() - began > longest else min(wait * 2, longest)
        await set_within(stop, wait)


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()

"""Listeners that cannot hurt the worker that calls them, and errors that cannot vanish.

Promise: a listener may be sync or async and may raise; the worker goes on, the listener's error is reported.
Without any set-up every error reaches the log. (In a stock worker a raising `active` listener leaves the job
active and unrun, a raising `error` listener ends the worker, an async one is never awaited, and without an
`error` listener nothing is said at all.)
It does not wait for async listeners before going on: what must happen for a job belongs into its processor.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ConnectionError, OutOfMemoryError, ReadOnlyError, ResponseError, TimeoutError

__all__ = ["WorkerEvents", "is_outage"]

log = logging.getLogger(__name__)


def is_outage(error: BaseException) -> bool:
    """Redis is away, starting, failing over, full or read-only: worth repeating, and no fault of the job."""
    if isinstance(error, ConnectionError | TimeoutError | ReadOnlyError | OutOfMemoryError | OSError):
        return True
    words = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ")
    return isinstance(error, ResponseError) and str(error).startswith(words)


class WorkerEvents:
    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None) -> None:
        self._name, self._on_error = name, on_error
        self._listeners: dict[str, list[Callable[..., Any]]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._away_since, self._reported = 0.0, 0.0

    def on(self, event: str, listener: Callable[..., Any]) -> None:
        self._listeners.setdefault(event, []).append(listener)

    def emit(self, event: str, *args: Any) -> None:
        for listener in self._listeners.get(event, ()):
            try:
                answer = listener(*args)
            except Exception as error:
                self.report(error, tell_listeners=event != "error")
            else:
                if answer is not None and inspect.isawaitable(answer):
                    work = self.guard(answer, tell_listeners=event != "error")
                    task = asyncio.get_running_loop().create_task(work)
                    self._running.add(task)  # the loop keeps weak references only: it might be collected
                    task.add_done_callback(self._running.discard)

    async def finish(self, seconds: float) -> None:
        """Let async listeners that still run come to an end."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    async def guard(self, work: Awaitable[Any], *, tell_listeners: bool = True) -> None:
        try:
            await work
        except Exception as error:
            self.failure(error, tell_listeners=tell_listeners)

    def failure(self, error: BaseException, *, tell_listeners: bool = True) -> None:
        """Report it, unless Redis is away and that was just said: every try of every job is a flood."""
        if is_outage(error):
            now = time.monotonic()
            self._away_since = self._away_since or now
            if self._reported and now - self._reported < 10:
                return
            self._reported = now
        self.report(error, tell_listeners=tell_listeners)

    def redis_answered(self) -> bool:
        """Say so if it had been away; True then."""
        if not self._away_since:
            return False
        log.warning("queue %s: Redis is back after %.1f s", self._name, time.monotonic() - self._away_since)
        self._away_since = self._reported = 0.0
        return True

    def report(self, error: BaseException, *, tell_listeners: bool = True) -> None:
        try:
            if self._on_error is not None:
                self._on_error(error)
            else:
                trace = (
                    None if is_outage(error) else error
                )  # where we stood when Redis went away says nothing
                log.error("queue %s: %s: %s", self._name, type(error).__name__, error, exc_info=trace)
        except Exception:
            log.exception("queue %s: on_error itself failed on %r", self._name, error)
        if tell_listeners:
            self.emit("error", error)

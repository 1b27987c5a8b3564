"""Listeners that cannot hurt the worker that calls them, and errors that cannot vanish.

Promise: a listener may be sync or async and may raise whatever it likes, a CancelledError or SystemExit too: no
job and no worker is touched, the listener's error is reported.
Without any set-up every error reaches the log. (In a stock worker a raising `active` listener leaves the job
active and unrun, a raising `error` listener ends the worker, an async one is never awaited, and without an
`error` listener errors vanish.)
It does not wait for async listeners before going on: what must happen for a job belongs in its processor.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ConnectionError, OutOfMemoryError, ReadOnlyError, ResponseError, TimeoutError

from ..core.failures import describe

__all__ = ["WorkerEvents", "is_outage"]

log = logging.getLogger(__name__)
Report = Callable[[BaseException], None]


def is_outage(error: BaseException) -> bool:
    """Redis is away, starting, failing over, full or read-only: worth repeating, and not the job's fault."""
    if isinstance(error, ConnectionError | TimeoutError | ReadOnlyError | OutOfMemoryError | OSError):
        return True
    words = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ")
    return isinstance(error, ResponseError) and str(error).startswith(words)


class WorkerEvents:
    def __init__(self, name: str, on_error: Callable[[BaseException], Any] | None) -> None:
        self._name, self._on_error = name, on_error
        self._listeners: dict[str, list[Callable[..., Any]]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._away_since, self._reported = 0.0, 0.0

    def on(self, event: str, listener: Callable[..., Any]) -> None:
        self._listeners.setdefault(event, []).append(listener)

    def off(self, event: str, listener: Callable[..., Any]) -> None:
        """Does nothing if it does not listen."""
        self._listeners[event] = [other for other in self._listeners.get(event, ()) if other != listener]

    def emit(self, event: str, *args: Any) -> None:
        for listener in tuple(self._listeners.get(event) or ()):  # tuple: it may add others
            self._call(listener, args, self.report if event != "error" else self._tell_owner)

    def _call(self, listener: Callable[..., Any], args: tuple[Any, ...], report: Report) -> None:
        """Whatever it raises ends here, CancelledError and SystemExit too: it is called in the task of a job."""
        try:
            answer = listener(*args)
            if answer is not None and inspect.isawaitable(answer):
                task = asyncio.get_running_loop().create_task(_finish(answer, report))
                self._running.add(task)  # the loop keeps weak references only: it might be collected
                task.add_done_callback(self._running.discard)
        except BaseException as error:
            report(error)

    async def finish(self, seconds: float) -> None:
        """Let async listeners that still run come to an end."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    async def guard(self, work: Awaitable[Any]) -> None:
        try:
            await work
        except Exception as error:
            self.failure(error)

    def failure(self, error: BaseException) -> None:
        """Report it, unless Redis is away and that was just said: every try of every job would be a flood."""
        if is_outage(error):
            now = time.monotonic()
            self._away_since = self._away_since or now
            if self._reported and now - self._reported < 10:
                return
            self._reported = now
        self.report(error)

    def redis_answered(self) -> bool:
        """Log it if Redis had been away; True then."""
        if not self._away_since:
            return False
        log.warning("queue %s: Redis is back after %.1f s", self._name, time.monotonic() - self._away_since)
        self._away_since = self._reported = 0.0
        return True

    def report(self, error: BaseException) -> None:
        self._tell_owner(error)
        self.emit("error", error)

    def _tell_owner(self, error: BaseException) -> None:
        if self._on_error is not None:
            self._call(self._on_error, (error,), self._log)
        else:
            self._log(error)

    def _log(self, error: BaseException) -> None:
        # The traceback of an outage says nothing.
        trace = None if is_outage(error) else error
        log.error("queue %s: %s: %s", self._name, type(error).__name__, describe(error), exc_info=trace)


async def _finish(answer: Awaitable[Any], report: Report) -> None:
    try:
        await answer
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the loop is ending
            raise
        report(error)
    except BaseException as error:
        report(error)

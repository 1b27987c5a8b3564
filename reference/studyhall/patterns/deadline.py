"""Deadline: a time limit that stops the work, not only the waiting for it.

Promise: when the limit passes, the coroutine is cancelled and has ended before `DeadlineExceeded` is raised;
what it had finished travels on the error; the next attempt may get a longer limit. Processes started with
`owned_process` are killed with their whole group, and so are the children of `isolation.SubprocessPool`. Time in
`uncharged` does not count: waiting for a turn behind somebody else's work is not this work being slow.

Does not hold for code that blocks the event loop or runs in a thread (neither can be cancelled: use
`isolation`), nor for a coroutine that swallows CancelledError. That one gets `grace` seconds, then it is
abandoned and named in the log and on the error (`abandoned`): it may still act, so give its effects an
idempotency key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from .core.errors import DeadlineExceeded, Transient
from .core.execution import CallNext, JobContext, Step
from .core.job import Deadline

__all__ = ["Deadline", "DeadlineExceeded", "owned_process", "remaining", "run_within", "uncharged", "within_deadline"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_abandoned: set[asyncio.Task[Any]] = set()  # the loop holds tasks weakly; an abandoned one must stay visible
_LAST_CALL = 0.05


class _Limit:
    """When one `run_within` ends; `ended` is set then, or by `end`."""

    __slots__ = ("_loop", "_paused_at", "_waits", "_watch", "ended", "ends_at", "outer")

    def __init__(self, loop: asyncio.AbstractEventLoop, ends_at: float, outer: _Limit | None) -> None:
        self.ends_at, self.outer = ends_at, outer
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop, self._watch = loop, _watch_of(loop)
        self._waits, self._paused_at = 0, 0.0

    def start(self) -> None:
        self._watch.add(self)

    def stop(self) -> None:
        self._watch.limits.discard(self)

    def end(self, _: object = None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def pause(self) -> None:
        if not self._waits:
            self._paused_at = self._loop.time()
            self.stop()
        self._waits += 1

    def resume(self) -> None:
        self._waits -= 1
        if not self._waits:
            self.ends_at += self._loop.time() - self._paused_at
            self.start()


class _Watch:
    """One timer for all limits of a loop, set for the earliest. Hardly any is reached: a timer for each of them costs
    more than looking through those that run when it rings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.limits = loop, set[_Limit]()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def add(self, limit: _Limit) -> None:
        self.limits.add(limit)
        if limit.ends_at < self._rings_at:
            self._set(limit.ends_at)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at, self._timer = at, self.loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._rings_at, self._timer = math.inf, None
        now = self.loop.time() + _EARLY
        for limit in [limit for limit in self.limits if limit.ends_at <= now]:
            self.limits.discard(limit)
            limit.end()
        if self.limits:
            self._set(min(limit.ends_at for limit in self.limits))


_EARLY = 0.001  # uvloop rounds to milliseconds
_watches = threading.local()


def _watch_of(loop: asyncio.AbstractEventLoop) -> _Watch:
    watch: _Watch | None = getattr(_watches, "latest", None)
    if watch is None or watch.loop is not loop:
        watch = _watches.latest = _Watch(loop)
    return watch


_innermost: ContextVar[_Limit | None] = ContextVar("deadline", default=None)


async def run_within(
    seconds: float,
    work: Callable[..., Awaitable[T]],
    *args: Any,
    grace: float = 5.0,
    partial: Callable[[], Any] | None = None,
    name: str = "",
) -> T:
    """Await `work(*args)` for at most `seconds`. When time is up, `partial()` is asked for what is finished.

    Work that catches its cancellation and returns within `grace` hands over a partial result that way.
    """
    loop = asyncio.get_running_loop()
    label = name or str(getattr(work, "__qualname__", work))
    outer = _innermost.get()
    ends_at = loop.time() + seconds
    limit = _Limit(loop, min(ends_at, outer.ends_at) if outer else ends_at, outer)
    context = copy_context()
    context.run(_innermost.set, limit)
    task: asyncio.Task[T] = loop.create_task(_call(work, args), name=label, context=context)
    task.add_done_callback(limit.end)
    limit.start()
    try:
        await limit.ended  # what asyncio.wait does, at half its cost: every job passes here
    except asyncio.CancelledError as why:
        await _stop(task, grace, label, *why.args[:1])  # the work learns why: see `cancel.stop_reason`
        raise
    finally:
        limit.stop()
    if task.done():
        return task.result()
    stopped = await _stop(task, grace, label)
    kept, cause = (partial() if partial else None), None
    if stopped and not task.cancelled():
        cause = task.exception()
        if cause is None and kept is None:
            kept = task.result()
    text = f"{label} did not finish within {seconds:g} s"
    if not stopped:
        text += f" and ignored its cancellation for {grace:g} s: abandoned. It must not swallow CancelledError"
    raise DeadlineExceeded(text, limit=seconds, partial=kept, abandoned=not stopped) from cause


def within_deadline(default: float = 60.0, *, grace: float = 5.0) -> Step:
    """Stop the work at the limit of its job type, or after `default` seconds."""

    def within_deadline(run: JobContext, call_next: CallNext) -> Awaitable[Any]:
        run.limit = run.deadline.limit_for(run.attempt) if run.deadline else default
        run.started = time.monotonic()
        return run_within(run.limit, call_next, run, grace=grace, name=run.name)

    return within_deadline


def remaining() -> float:
    """Seconds left in the innermost `run_within` around the caller; infinite outside of one."""
    limit = _innermost.get()
    return max(limit.ends_at - asyncio.get_running_loop().time(), 0.0) if limit else math.inf


@contextlib.contextmanager
def uncharged() -> Iterator[None]:
    """Time spent in this block is added to every limit around the caller; something else has to bound it."""
    limit, paused = _innermost.get(), list[_Limit]()
    while limit is not None:
        paused.append(limit)
        limit = limit.outer
    for limit in paused:
        limit.pause()
    try:
        yield
    finally:
        for limit in paused:
            limit.resume()


@contextlib.asynccontextmanager
async def owned_process(*argv: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A subprocess that never outlives the block: at its end the whole process group gets SIGKILL."""
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*argv, start_new_session=True, **options))
    try:
        # Shielded: cancelled while it starts one, asyncio kills the process but not what that has started.
        yield await asyncio.shield(starting)
    finally:
        process = await starting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group: a shell's children would survive the shell
        await process.wait()


async def _call(work: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    try:
        return await work(*args)
    except (SystemExit, KeyboardInterrupt) as error:
        # asyncio raises these two out of the event loop as well, where they end everything else that runs in it.
        raise Transient(f"the work raised {error!r}") from error


async def _stop(task: asyncio.Task[Any], grace: float, label: str, reason: object = None) -> bool:
    """Cancel, then wait. A second cancel only after the grace: it would cut an honest `finally` short."""
    for wait in (grace, _LAST_CALL):
        task.cancel(reason)
        await asyncio.wait({task}, timeout=wait)
        if task.done():
            return True
    _abandoned.add(task)
    task.add_done_callback(_report_late)
    log.error("%s swallowed its cancellation, abandoned after %g s; it may still act", label, grace)
    return False


def _report_late(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    ended = "cancelled" if task.cancelled() else "completed"
    if not task.cancelled() and (error := task.exception()):
        ended = type(error).__name__
    log.error("abandoned work %s ended late: %s", task.get_name(), ended)

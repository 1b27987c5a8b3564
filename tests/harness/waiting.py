"""Poll until something is true; if it never is, the error names what was awaited."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(
    fn: Callable[[], T | Awaitable[T]], timeout: float = 10, what: str | Callable[[], str] = "", *, every: float = 0.02
) -> T:
    """Call `fn` (sync or async) until it returns something truthy, and return that.

    `what` may be a function, called when time is up: for what a process has printed by then.
    """
    deadline = time.monotonic() + timeout
    while True:
        got = fn()
        value: T = await got if inspect.isawaitable(got) else got
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(_never(fn, timeout, what, value))
        await asyncio.sleep(every)


def until_sync(fn: Callable[[], T], timeout: float = 10, what: str = "", *, every: float = 0.02) -> T:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + timeout
    while True:
        value = fn()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(_never(fn, timeout, what, value))
        time.sleep(every)


def _never(fn: object, timeout: float, what: str | Callable[[], str], last: object) -> str:
    name = (what() if callable(what) else what) or getattr(fn, "__name__", repr(fn))
    return f"not within {timeout:g} s: {name} (last value: {last!r})"


def clock_at(millis: int) -> Callable[[], Awaitable[int]]:
    """A clock that stands still, in place of a server's clock."""

    async def now() -> int:
        return millis

    return now

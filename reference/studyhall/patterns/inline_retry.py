"""Retries for calls outside a queue: bounded, jittered, and on a budget. `stamina` does the retrying.

Promise: at most `attempts` calls within `timeout` seconds, exponential pauses with full jitter between them, only for
`Transient` errors (an unknown error is a bug: it is raised at once). All calls together share a budget: retries
never exceed `share` of the calls plus `reserve`, so a dead dependency gets its normal load and a tenth more
instead of three times as much. `RateLimited` is waited for if its `retry_after` fits into the time.

Never inside a job: three attempts of a job times three here are nine calls. Raise, and let the queue retry.
Never around something that is not idempotent, unless the other side honours a key.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import stamina

from .core.errors import RateLimited, Transient

__all__ = ["Budget", "call"]

T = TypeVar("T")


class Budget:
    """Shared by all callers of one dependency in a process: each call earns `share` of a retry."""

    def __init__(self, *, share: float = 0.1, reserve: int = 10) -> None:
        if not 0 <= share <= 1 or reserve < 0:
            raise ValueError("a budget needs a share within 0 to 1 and a reserve of 0 or more")
        self._share, self._most, self._left = share, float(max(reserve, 1)), float(reserve)

    def earn(self) -> None:
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


async def call(
    fn: Callable[[], Awaitable[T]],
    *,
    attempts: int = 3,
    timeout: float = 10.0,
    base: float = 0.1,
    cap: float = 2.0,
    budget: Budget | None = None,
) -> T:
    """`await call(lambda: client.get(...), budget=...)`. The last error is raised as it is."""
    end = time.monotonic() + timeout
    calls = 0
    if budget is not None:
        budget.earn()

    def again(error: Exception) -> bool | float:
        if not isinstance(error, Transient | RateLimited | TimeoutError):
            return False
        # Our own pause: stamina adds its jitter before it cuts at `wait_max`, so at the cap all clients wait
        # equally long and come back together. Full jitter spreads them over the whole pause.
        jittered = random.random() * min(cap, base * 2 ** (calls - 1))
        wait = max(0.001, error.retry_after if isinstance(error, RateLimited) else jittered)
        in_time = calls < attempts and time.monotonic() + wait < end
        return wait if in_time and (budget is None or budget.spend()) else False

    policy = stamina.AsyncRetryingCaller(attempts=attempts, timeout=timeout)

    async def bounded() -> T:
        nonlocal calls
        calls += 1
        async with asyncio.timeout(max(0.0, end - time.monotonic())):
            return await fn()

    return await policy(again, bounded)

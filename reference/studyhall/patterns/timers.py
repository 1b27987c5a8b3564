"""Timers inside a process: what is fine, and what stops you from running two instances.

Fine: a timeout, a pause between two tries, a one-off delay of seconds that nobody misses after a crash, and a
loop over something that every process has for itself (its metrics, its cache, its connections). `every` is that
loop: runs never overlap, an error is logged and does not end it, the pause is jittered so that instances which
started together do not stay in step.

Not fine: an interval for something there is once (reminders, clean-up, a report). Three instances do it three
times, none does it while they restart, and a delay of an hour dies with the process. The first belongs to
`schedule`, the second to `delayed`: both live in Redis, run once and survive. `every` counts by the monotonic
clock: setting the clock of the machine does nothing to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

__all__ = ["every"]

log = logging.getLogger("timers")


async def every(
    seconds: float,
    work: Callable[[], Awaitable[object]],
    *,
    stop: asyncio.Event | None = None,
    jitter: float = 0.1,
    limit: float | None = None,
) -> None:
    """Do `work`, pause, again, until `stop` is set or we are cancelled. `limit`: seconds for one run."""
    if seconds <= 0 or not 0 <= jitter < 1:
        raise ValueError("a loop needs a pause above 0 and a jitter from 0 to below 1")
    stop = stop or asyncio.Event()
    while not stop.is_set():
        try:
            async with asyncio.timeout(limit):
                await work()
        except Exception as error:  # the next run may go well; a loop that ended would tell nobody
            log.exception("a timer's work failed: %s", type(error).__name__)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(1 - jitter, 1 + jitter)):
                await stop.wait()

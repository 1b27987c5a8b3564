"""Timers inside a process: what is fine, and what stops you from running two instances.

Fine: a timeout, a pause between two tries, a one-off delay of seconds that nobody misses after a crash, and a
loop over something that every process has for itself (its metrics, its cache, its connections). `every` is that
loop: runs never overlap, an error is logged and does not end it, the pause is jittered so that instances which
started together do not stay in step.

Not fine: an interval for something there is once (reminders, clean-up, a report). Three instances do it three
times, none does it while they restart, and a delay of an hour dies with the process. The first belongs in
`schedule`, the second in `delayed`: both live in Redis, run once and survive. `every` counts by the monotonic
clock: setting the clock of the machine does nothing to it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from .core.clock import Periodic

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

    async def run() -> None:
        async with asyncio.timeout(limit):
            await work()

    def report(error: BaseException) -> None:
        log.error("a timer's work failed: %s", type(error).__name__, exc_info=error)

    loop = Periodic("a timer", run, every=seconds, jitter=jitter, on_error=report)
    if stop is None:
        return await loop.run()

    async def watch() -> None:
        await stop.wait()
        loop.stop()

    if stop.is_set():
        return None
    watching = asyncio.create_task(watch())
    try:
        await loop.run()
    finally:
        watching.cancel()

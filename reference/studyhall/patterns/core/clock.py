"""Work that is repeated inside a process until it is told to stop.

Promise: an error is reported and the next round comes all the same; a round that says there is more to do is
followed by the next one at once; `drain` lets the round under way finish. `run` returns after `drain` and never
otherwise, except by cancellation.
It is not a schedule: every process has its own rounds. What must happen once for all of them belongs in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

__all__ = ["Periodic", "told_to_end"]

log = logging.getLogger("periodic")


class Periodic:
    """`Periodic("sweep", sweep, every=5)`: run it beside the workers (`run_until_signalled`)."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[object]],
        *,
        every: float,
        retry: float | None = None,
        jitter: float = 0.2,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """`work` returns True to be called again at once. `retry`: the pause after an error, where that is not
        `every`. `jitter`: processes must not work in step."""
        self._name, self._work, self._every, self._jitter = name, work, every, jitter
        self._retry = every if retry is None else retry
        self._on_error = on_error
        self._stop, self._woken = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        failing = False
        while not self._stop.is_set():
            try:
                again = await self._work() is True
                if failing:
                    log.warning("%s works again", self._name)
                failing = False
            except Exception as error:
                again = False
                if self._on_error is not None:
                    self._on_error(error)
                elif not failing:  # once per outage: every round of it would be a flood
                    log.error("%s failed; trying again every %g s", self._name, self._retry, exc_info=error)
                failing = True
            if not again:
                pause = self._retry if failing else self._every
                await self._pause(pause * random.uniform(1 - self._jitter, 1 + self._jitter))

    def wake(self) -> None:
        """There is work: do not wait for the next round."""
        self._woken.set()

    async def drain(self, grace: float) -> list[str]:
        """As of a worker: stop after the round under way."""
        self._stop.set()
        self._woken.set()
        return []

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        if not self._stop.is_set():
            self._woken.clear()


def told_to_end() -> bool:
    """Is this task being cancelled? If not, a `CancelledError` is somebody else's: an error like any other."""
    return (task := asyncio.current_task()) is None or task.cancelling() > 0

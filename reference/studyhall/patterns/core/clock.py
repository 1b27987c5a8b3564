"""Work that is repeated inside a process until it is told to stop.

Promise: an error is reported and the next round comes anyway, even after a `CancelledError` that escaped from inside;
a round that says there is more to do is followed by the next at once; `stop` lets the current round finish. `run`
returns only after `stop` or by cancellation.
It is not a schedule: every process has its own rounds. What must happen once for all belongs in `schedule`.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .failures import describe

__all__ = ["Periodic", "apart", "told_to_end"]

log = logging.getLogger("periodic")
_AWAY = {"ConnectionError", "TimeoutError", "OSError", "OperationalError", "Unavailable", "QueueUnavailable"}
T = TypeVar("T")


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
        on_error: Callable[[BaseException], float | None] | None = None,
    ) -> None:
        """`work` returns True to be called again at once, or the seconds until the next round. `retry`: the pause
        after an error, if not `every`. `jitter`: processes must not work in step. `on_error` gets every error
        instead of the log, and may return the pause."""
        self._name, self._work, self._every, self._jitter = name, work, every, jitter
        self._retry = every if retry is None else retry
        self._on_error = on_error
        self._failing = False
        self._stop, self._woken = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        while not self._stop.is_set():
            try:
                again = await apart(self._work)
                pause, wakeable = (again, False) if isinstance(again, float) else (self._every, True)
                if self._failing:
                    log.warning("%s works again", self._name)
                    self._failing = False
            except (Exception, asyncio.CancelledError) as error:
                if told_to_end():
                    raise
                again, pause, wakeable = False, self._failed(error), False
            if again is not True:
                spread = random.uniform(1 - self._jitter, 1 + self._jitter)
                await _set_within(self._woken if wakeable else self._stop, pause * spread)
            if not self._stop.is_set():
                self._woken.clear()

    def wake(self) -> None:
        """There is work: do not wait for the next round. A pause that `work` or an error asked for is kept."""
        self._woken.set()

    def stop(self) -> None:
        """After the current round."""
        self._stop.set()
        self._woken.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def drain(self, grace: float) -> list[str]:
        """Like a worker's."""
        self.stop()
        return []

    def _failed(self, error: BaseException) -> float:
        if self._on_error is not None:
            pause = self._on_error(error)
            return self._retry if pause is None else pause
        if not self._failing:  # once per outage: every round of it would be a flood
            # The traceback of an outage says nothing. By name: this module needs no package.
            away = _AWAY & {kind.__name__ for kind in type(error).__mro__}
            words = self._name, type(error).__name__, describe(error), self._retry
            log.error("%s failed: %s: %s; trying again every %g s", *words, exc_info=None if away else error)
            self._failing = True
        return self._retry


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def apart(work: Callable[..., Awaitable[T]], *args: object) -> T:
    """Call foreign code in a task of its own. On Python before 3.13 a TaskGroup whose child failed leaves its
    task marked as cancelled, and `told_to_end` would believe it: a loop ended with the first such error."""

    async def called() -> T:
        return await work(*args)

    return await asyncio.create_task(called())


def told_to_end() -> bool:
    """Is this task being cancelled? If not, a `CancelledError` is somebody else's: an error like any other."""
    return (task := asyncio.current_task()) is None or task.cancelling() > 0

"""Progress people can read, at a rate the queue can carry.

Promise: every milestone (a new stage, the end) is stored and announced; between milestones only the latest
state goes out, at most once per `interval`. Reporting per row is therefore free.

It does not hold for the history between milestones: it is thinned on purpose. 15,000 raw updates pushed
5 of 6 completion events out of the queue's event stream before anybody read them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["Progress"]


class Progress:
    """`await progress("analysing", 40, "section 2 of 5", sections=5)`; call `flush` at the end."""

    def __init__(
        self,
        send: Callable[[dict[str, Any]], Awaitable[object]],
        *,
        interval: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._interval = interval
        self._clock = clock
        self._stage: str | None = None
        self._sent_at = 0.0
        self._held: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None

    async def __call__(self, stage: str, percent: float, message: str = "", **detail: Any) -> None:
        percent = min(100.0, max(0.0, round(float(percent), 1)))
        update = {"stage": stage, "percent": percent, "message": message, "detail": detail}
        self.last = update
        milestone = stage != self._stage or percent >= 100
        self._stage = stage
        if milestone or self._clock() - self._sent_at >= self._interval:
            await self._emit(update)
        else:
            self._held = update

    async def flush(self) -> None:
        """Send what throttling held back."""
        if self._held is not None:
            await self._emit(self._held)

    async def _emit(self, update: dict[str, Any]) -> None:
        self._held = None
        self._sent_at = self._clock()
        await self._send(update)

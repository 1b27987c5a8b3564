"""Progress people can read, at a rate the queue can carry.

Promise: every milestone (a new stage, the end) is stored and announced; between milestones only the latest
state goes out, at most once per `interval`. Reporting per row is therefore free. A report that cannot be
sent (Redis is away) never fails the work: milestones are kept and go out, in order, with the next report.

It does not hold for the history between milestones: it is thinned on purpose. 15,000 raw updates pushed
5 of 6 completion events out of the queue's event stream before anybody read them.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from .core.execution import CallNext, JobContext, Step

__all__ = ["Progress", "reporting"]

log = logging.getLogger("progress")
MAX_MESSAGE = 500
MAX_DETAIL = 4_000  # bytes of JSON: every report goes to Redis and to every listener
MAX_KEPT = 100  # milestones that wait for Redis


class Progress:
    """`await progress("analysing", 40, "section 2 of 5", sections=5)`; call `flush` at the end."""

    def __init__(
        self,
        send: Callable[[dict[str, Any]], Awaitable[object]],
        *,
        interval: float = 0.25,
        patience: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: seconds that one report may take; the work waits for it."""
        self._send = send
        self._interval = interval
        self._patience = patience
        self._clock = clock
        self._stage: str | None = None
        self._sent_at = -math.inf
        self._milestones: list[dict[str, Any]] = []
        self._held: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None

    async def __call__(self, stage: str, percent: float, message: str = "", **detail: Any) -> None:
        update = {
            "stage": stage,
            "percent": _bounded(percent),
            "message": message[:MAX_MESSAGE],
            "detail": _small(detail),
        }
        milestone = stage != self._stage or (update["percent"] == 100 and update != self.last)
        self.last, self._stage = update, stage
        if milestone:
            self._milestones = [*self._milestones, update][-MAX_KEPT:]
            self._held = None
        else:
            self._held = update
        if milestone or self._clock() - self._sent_at >= self._interval:
            await self.flush()

    async def flush(self) -> None:
        """Send what throttling, or an outage, held back."""
        waiting = [*self._milestones, *([self._held] if self._held else [])]
        for update in waiting:
            self._sent_at = self._clock()
            try:
                async with asyncio.timeout(self._patience):
                    await self._send(update)
            except Exception as error:  # a progress bar is not worth a job
                log.warning("progress not sent: %s", type(error).__name__)
                return
            if update is self._held:
                self._held = None
            else:
                self._milestones = self._milestones[1:]


def reporting(interval: float = 0.25) -> Step:
    """Gives handlers `ctx.progress`, and sends what was held back when the work has ended well."""

    async def reporting(run: JobContext, call_next: CallNext) -> Any:
        run._reports = lambda: Progress(run.job.updateProgress, interval=interval)
        answer = await call_next(run)
        if run._progress is not None:
            await run._progress.flush()
        return answer

    return reporting


def _bounded(percent: float) -> float:
    percent = float(percent)
    return 0.0 if math.isnan(percent) else min(100.0, max(0.0, round(percent, 1)))


def _small(detail: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(detail))
    except (TypeError, ValueError) as error:
        return {"left_out": f"not JSON: {error}"[:200]}
    return detail if size <= MAX_DETAIL else {"left_out": f"{size} bytes"}

"""While the database is away, one job at a time finds out whether it is back; the others wait.

Promise: after an outage was seen, an execution passes the gate only every `pause` seconds (half a second at
first, doubling to `LONGEST`), and all of them as soon as one has written. The jobs that wait keep their places
in the worker, so the worker fetches no more. Nobody waits longer than `PATIENCE`: then the job is released for
later, to a worker that may still reach the database.

When it does not hold: each process finds out for itself, and jobs under way when the database went away
fail once more per slot. A database that reads but cannot write (disk full) is away too: a duplicate that was
answered from it opens nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import Any

from .core.execution import CallNext, JobContext, Step
from .core.failures import describe
from .core.job import Outcome
from .core.store import StoreUnavailable, is_outage

__all__ = ["StoreGate", "store_gate"]

log = logging.getLogger("store")
FIRST = 0.5
LONGEST = 15.0
PATIENCE = 20.0


def store_gate(gate: StoreGate | None = None) -> Step:
    """Before every step that uses the database: while it is away, jobs wait and consume no attempt."""
    gate = gate or StoreGate()

    async def store_gate(run: JobContext, call_next: CallNext) -> Any:
        entered = await gate.enter() if gate.closed else time.monotonic()
        try:
            answer = await call_next(run)
        except BaseException as error:
            gate.left(entered, error)
            # From a store used past `begin`.
            if is_outage(error) and not isinstance(error, StoreUnavailable):
                raise StoreUnavailable(describe(error)) from error
            raise
        gate.left(entered)
        if run.ended is not Outcome.DUPLICATE:
            gate.back()
        return answer

    return store_gate


class StoreGate:
    """One per process and database."""

    def __init__(self) -> None:
        self._pause = 0.0  # 0: open
        self._next = self._noticed = self._since = 0.0
        self._changed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._pause > 0

    def left(self, entered: float, error: BaseException | None = None) -> None:
        """After `enter`, with how the work ended."""
        if entered >= self._noticed:  # not the many that were under way when the outage was noticed
            if error is not None and is_outage(error):
                self._away()
            elif self._pause:  # nothing to write, or another error: the next one may try at once
                self._next = 0.0
                self._wake()

    def back(self) -> None:
        """Something was written: let everybody in."""
        if self._pause:
            log.warning("the database is back after %.1f s", time.monotonic() - self._since)
            self._pause = 0.0
            self._wake()

    async def enter(self) -> float:
        """Waits until the database may be used; returns when, for `left`. `StoreUnavailable` after `PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while (now := time.monotonic()) < self._next and self._pause:
            if now >= deadline:
                raise StoreUnavailable(f"{StoreUnavailable.__doc__} Waited {PATIENCE:g} s for its return.")
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._next, deadline) - now):
                    await self._changed.wait()
        self._next = now + self._pause * (0.5 + random.random())
        return now

    def _away(self) -> None:
        self._noticed = time.monotonic()
        if not self._pause:
            self._since = self._noticed
            log.warning("the database is away: jobs wait for it and consume no attempt")
        self._pause = min(self._pause * 2 or FIRST, LONGEST)
        self._next = self._noticed + self._pause * (0.5 + random.random())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

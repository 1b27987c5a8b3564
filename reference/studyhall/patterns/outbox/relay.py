"""Outbox relay: claim → publish → settle, in batches, in any number of processes.

Promise: every committed event is handed to the publisher until it is durably accepted, in order per
subject. A failing event delays only its own subject, with backoff and jitter, and is quarantined with the
reason when its error is permanent or its attempts are used up. An event the bus does not confirm
consumes no attempt, whatever happens to the rest of its batch.
`stop` finishes the publish in flight, writes down what happened and releases the rest at once; nothing but
`stop` or cancellation ends a relay.

When it does NOT hold
- A relay that dies keeps its batch until the lease ends: those subjects wait up to `lease` seconds, then
  their events are published again under the same ids.
- At least once, not exactly: relays duplicate nothing while each answers within its lease. One that stalls for
  longer (a paused machine, a starved one under a lease of less than a second) loses its batch to another, and
  both publish it: the same ids, first copies still in order.
- `lease` must be well above the time the bus takes for one batch: at 70 % of it the publish is cut off, and what
  the bus had accepted by then is published again.
- Per subject one event is in flight at a time, because a partly accepted batch would reorder it.
  One hot subject is therefore as slow as the publisher's round trip.
"""

import asyncio
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.clock import Periodic, apart, told_to_end
from ..core.event import BrokerUnavailable, Event, InvalidEvent
from ..core.failures import describe
from ..core.job import RetryPolicy
from ..core.redaction import redact_text
from ..core.store import answers_within
from ..retry import decide, full_jitter
from .claims import BATCH_BYTES, Claimed, Failure, Search, claim, settle
from .quarantine import purge
from .table import BUS
from .wakeup import Wakeup, open_wakeup

__all__ = ["EVENTS_OUT", "Publisher", "Relay", "RelayCounts"]

log = logging.getLogger("outbox")
WEEK = 7 * 24 * 3600.0
EVENTS_OUT = RetryPolicy(base=0.5, cap=60.0, attempts=10, max_age=WEEK)
OUTAGE = RetryPolicy(base=0.2, cap=5.0)
BUS_AWAY = (BrokerUnavailable, OSError)  # OSError covers ConnectionError and TimeoutError
CUT_OFF = 0.7  # of the lease: the rest is for recording the outcome before another relay may claim it
PURGE_EVERY = 60.0
PURGE_BATCH = 1000


class Publisher(Protocol):
    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        """One entry per event: None = durably accepted, else why not. Every `EventBus` fits."""
        ...


@dataclass(slots=True)
class RelayCounts:
    published: int = 0
    failed: int = 0
    quarantined: int = 0
    outages: int = 0


class Relay:
    """`await relay.run()` until `relay.stop()`; `run_once()` for tests and schedulers."""

    def __init__(
        self,
        store: AsyncEngine,
        publisher: Publisher,
        *,
        destination: str = BUS,
        worker_id: str | None = None,
        batch: int = 500,
        batch_bytes: int = BATCH_BYTES,
        lease: float = 30.0,
        poll: float = 1.0,
        policy: RetryPolicy = EVENTS_OUT,
        hold: bool = True,
        keep: float = WEEK,
    ) -> None:
        self.worker_id = worker_id or f"{socket.gethostname()[:50]}-{os.getpid()}-{uuid4().hex[:8]}"
        self.counts = RelayCounts()
        self._store, self._publisher, self._destination = store, publisher, destination
        self._batch, self._batch_bytes, self._lease = batch, batch_bytes, lease
        self._policy, self._hold, self._keep = policy, hold, keep
        self._rounds = Periodic("outbox relay", self._round, every=poll, on_error=self._store_failed)
        self._listening: asyncio.Task[None] | None = None
        self._outages = 0  # in a row
        self._unwritten: list[int] = []  # published, but not yet recorded in the store
        self._purge_at = 0.0
        self._search = Search()

    def stop(self) -> None:
        self._rounds.stop()

    async def drain(self, grace: float) -> list[str]:
        """As for a worker, for `run_until_signalled`: `run` returns when the batch in flight is recorded."""
        self.stop()
        return []

    async def run(self) -> None:
        """Works until `stop` or cancellation. Every other error is logged and retried after a pause."""
        try:
            with answers_within():
                await self._rounds.run()
        finally:
            await self._stop_listening()

    async def _round(self) -> bool | float:
        await self._listen()
        outages = self.counts.outages
        busy = await self._one_batch(self._search.claim) + await self._purge()
        if self.counts.outages > outages:
            return self._pause()
        self._outages = 0
        return busy > 0

    def _store_failed(self, error: BaseException) -> float:
        # Any error: a list of outage errors missed the pool's own TimeoutError.
        self._outage("store", error)
        if self._listening is not None:  # on a connection that may be as dead as the others
            self._listening.cancel()
        return self._pause()

    def _pause(self) -> float:
        return max(full_jitter(OUTAGE, self._outages), 0.05)

    async def _listen(self) -> None:
        """Before the first look at the table: later commits wake us up."""
        if self._listening is not None and self._listening.done():
            ended, self._listening = self._listening, None
            if not ended.cancelled():
                ended.result()  # raises its error: an outage like any other
        if self._listening is None:
            self._listening = asyncio.create_task(self._hear(await open_wakeup(self._store)))

    async def _hear(self, wakeup: Wakeup) -> None:
        try:
            while True:
                await wakeup.wait()
                self._rounds.wake()
        finally:
            self._rounds.wake()
            with suppress(Exception):
                await wakeup.close()

    async def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def run_once(self) -> int:
        """One batch. Returns how many events were claimed."""
        return await self._one_batch(claim)

    async def _one_batch(self, claim: Callable[..., Awaitable[list[Claimed]]]) -> int:
        until = time.monotonic() + self._lease * CUT_OFF
        await self._write_down()
        claimed = await claim(
            self._store,
            self.worker_id,
            self._batch,
            self._lease,
            destination=self._destination,
            hold=self._hold,
            max_bytes=self._batch_bytes,
        )
        published: list[int] = []
        failed: dict[str, Failure] = {}  # by subject: its later events have to wait
        try:
            for wave in _waves(claimed):
                ready = [row for row in wave if row.subject not in failed]
                if self._rounds.stopping or time.monotonic() > until:
                    break
                results = await self._publish(ready, until)
                away = [result for result in results if isinstance(result, BUS_AWAY)]
                accepted = None in results
                for row, result in zip(ready, results, strict=True):
                    if result is None:
                        published.append(row.position)
                    elif not isinstance(result, BUS_AWAY):
                        failed[row.subject] = self._judge(row, result)
                    elif accepted:  # the bus is up, it failed only this event
                        failed[row.subject] = _wait(row, result)
                if away and not accepted:
                    self._outage("bus", away[0])
                    break
        finally:
            if claimed:
                self._unwritten += published
                self.counts.published += len(published)
                tried = {*published, *(failure.position for failure in failed.values())}
                rest = [row.position for row in claimed if row.position not in tried]
                await self._write_down()  # first, and apart: an error with the rest must not undo it
                await settle(self._store, self.worker_id, failed=list(failed.values()), released=rest)
        return len(claimed)

    async def _write_down(self) -> None:
        """Repeated until the store takes it: within the lease, that avoids publishing twice."""
        await settle(self._store, self.worker_id, published=self._unwritten)
        self._unwritten = []

    async def _publish(self, rows: Sequence[Claimed], until: float) -> Sequence[BaseException | None]:
        """One entry per row. A publisher that raises for a whole batch is asked again in halves."""
        if not rows:
            return []
        try:
            events = [Event.decode(row.body, max_bytes=len(row.body) * 4) for row in rows]
            async with asyncio.timeout(max(until - time.monotonic(), 0.1)):
                return await apart(self._publisher.publish, events)
        except TimeoutError:
            slow = f"no answer within 70 % of the lease of {self._lease:g} s: if the bus is only slow, raise `lease`"
            return [BrokerUnavailable(slow)] * len(rows)
        except BUS_AWAY as error:
            return [error] * len(rows)
        except (Exception, asyncio.CancelledError) as error:
            if told_to_end():
                raise
            if len(rows) == 1:
                return [error]
            half = len(rows) // 2
            return [*await self._publish(rows[:half], until), *await self._publish(rows[half:], until)]

    def _judge(self, row: Claimed, error: BaseException) -> Failure:
        age = max(time.time() - row.created_at, 0.0)
        decision = decide(error, self._policy, row.attempts, age=age)
        # Kept in the table, shown on consoles and logged: a broker's refusal often quotes what it was sent.
        reason = redact_text(
            f"{error.reason}: {describe(error)}" if isinstance(error, InvalidEvent) else decision.reason
        )
        self.counts.failed += 1
        if decision.delay is None:
            self.counts.quarantined += 1
            log.error("outbox: event %s (%s) quarantined: %s", row.event_id, row.subject, reason[:300])
        else:
            again = "outbox: event %s (%s), again in %.1f s: %s"
            log.info(again, row.event_id, row.subject, decision.delay, reason[:300])
        return Failure(row.position, reason, decision.delay, decision.consume_attempt)

    async def _purge(self) -> int:
        """One short delete per round, so that a big purge does not hold up publishing."""
        if time.monotonic() < self._purge_at:
            return 0
        gone = await purge(self._store, self._keep, batch=PURGE_BATCH)
        if gone < PURGE_BATCH:
            self._purge_at = time.monotonic() + PURGE_EVERY
        return gone

    def _outage(self, what: str, error: BaseException) -> None:
        self._outages += 1
        self.counts.outages += 1
        why = redact_text(f"{type(error).__name__}: {describe(error)}")[:300]
        log.warning("outbox: %s failed (%d in a row), no attempt consumed: %s", what, self._outages, why)


def _wait(row: Claimed, error: BaseException) -> Failure:
    reason = redact_text(f"{type(error).__name__}: {describe(error)}")
    return Failure(row.position, reason, full_jitter(OUTAGE, 3), consume_attempt=False)


def _waves(claimed: Sequence[Claimed]) -> Iterator[list[Claimed]]:
    """The first event of every subject, then the second ones: a failure can still hold back the next."""
    lines: defaultdict[str, list[Claimed]] = defaultdict(list)
    for row in claimed:
        lines[row.subject].append(row)
    for wave in zip_longest(*lines.values()):
        yield [row for row in wave if row is not None]

"""Degraded mode: while Redis is away, requests are accepted into the database and queued when it is back.

Promises
- `enqueue` answers within 2 s whatever state Redis is in (never up, killed, frozen): the job is queued, or its
  request is a row in `pending_jobs`. Once an outage is noticed, later calls go to the database at once.
- `accept(tx, …)` writes the row in the caller's own transaction, so the business row and its job exist together
  or not at all; a crash between the commit and the queue costs nothing.
- Nothing has to be restarted: the next call after `retry_every` seconds tries Redis again, and a `Drainer`
  (see `pending`) queues the rest. However often a request was sent, timed out or landed, it is one job.

When they do not hold
- The database away too: the caller gets its error, and nothing is accepted.
- More than `most` rows: `Overloaded`. An unlimited table is the same trouble elsewhere.
- Work nobody will wait for: let `Producer.enqueue` raise `QueueUnavailable` and answer 503.
"""

import time
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.errors import FailedTwin, Overloaded, QueueUnavailable, ResourceBusy
from ..core.request import JobRef, JobRequest, Outgoing
from ..core.store import begin, read
from . import pending as pending_jobs

__all__ = ["Accepted", "DegradedProducer"]

HEAD_START = 5.0  # seconds in which the accepting process hands its row over itself


@dataclass(frozen=True, slots=True)
class Accepted:
    """`queued`: in the queue now. Otherwise in the database, and in the queue when Redis is back."""

    ref: JobRef
    queued: bool


class DegradedProducer:
    """Wraps the `Producer` of a process.

    accepted = await degraded.enqueue(request)      # one job, nothing else to store

    await degraded.admit(request)                   # or together with rows of your own
    async with begin(store) as tx:
        await add_order(tx, order)
        await degraded.accept(tx, request)
    accepted = await degraded.hand_over(request)
    """

    def __init__(
        self, producer: pending_jobs.Enqueues, store: AsyncEngine, *, most: int = 10_000, retry_every: float = 2.0
    ) -> None:
        self.producer, self._store, self._most, self._retry_every = producer, store, most, retry_every
        self._away_until = 0.0  # an outage was seen: not every caller has to find out for itself

    async def enqueue(self, request: JobRequest) -> Accepted:
        """Queue it, or store it if the queue does not answer. `Overloaded` when neither takes more."""
        if await self._queued(request):
            return Accepted(self.producer.ref(request), queued=True)
        await self._room()
        async with begin(self._store) as tx:
            ref = await pending_jobs.add(tx, self.producer, request, head_start=0.0)
        return Accepted(ref, queued=False)

    async def admit(self, request: JobRequest) -> None:
        """Before `accept`: is it valid, is there room? An absent Redis is not a reason to refuse, a full table is."""
        job = await self.producer.prepared(request)
        if not self._away:
            try:
                return await self._look(job)
            except QueueUnavailable:
                self._note_outage()
        return await self._room()

    async def accept(self, tx: AsyncConnection, request: JobRequest) -> JobRef:
        """Store it in the caller's transaction; call `hand_over` after the commit."""
        return await pending_jobs.add(tx, self.producer, request, head_start=HEAD_START)

    async def hand_over(self, request: JobRequest) -> Accepted:
        """Queue what `accept` stored. If that does not work now, or we die here, a drainer does it later."""
        ref = self.producer.ref(request)
        try:
            queued = await self._queued(request)
        except (ResourceBusy, FailedTwin):
            queued = False
        if queued:
            await pending_jobs.forget(self._store, ref.id)
        return Accepted(ref, queued)

    @property
    def _away(self) -> bool:
        return time.monotonic() < self._away_until

    async def _queued(self, request: JobRequest) -> bool:
        if not self._away:
            try:
                await self.producer.enqueue(request)
                return True
            except QueueUnavailable:
                self._note_outage()
        return False

    async def _look(self, job: Outgoing) -> None:
        if ask := getattr(self.producer.admission, "ask", None):
            async with self.producer.bounded():
                await ask(job.tree())

    def _note_outage(self) -> None:
        self._away_until = time.monotonic() + self._retry_every

    async def _room(self) -> None:
        async with read(self._store) as connection:
            table = pending_jobs.pending_jobs
            held = int(await connection.scalar(select(func.count()).select_from(table)) or 0)
        if held >= self._most:
            why = f"{held} requests wait for the queue to come back"
            raise Overloaded(f"{why}. {Overloaded.__doc__}", retry_after=30.0)

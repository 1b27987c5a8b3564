"""Requests that wait in the database for the queue, and the drainer that queues them.

Promise: `drain` queues what is pending when Redis answers, without a restart and from any number of processes.
The job id comes from the business key, so an add that timed out and landed after all, a second drainer, or a
caller that sent the same request three times make one job. What can never be queued is parked with its reason,
visible in `pending`. Delay and max_age count from acceptance.

When it does not hold
- A request that is queued again after its job was done and left Redis (retention) runs again; the idempotency
  marker then returns the stored result.
- A row stored before a deploy that changes the payload's model may be parked: `release` it after the fix.
"""

import json
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from sqlalchemy import Column, Double, Index, Integer, String, Table, Text, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.clock import Periodic
from ..core.errors import Expired, FailedTwin, Permanent, QueueUnavailable
from ..core.job import correlation, current_correlation_id, new_correlation_id
from ..core.request import JobRef, JobRequest, Outgoing, payload_of
from ..core.store import begin, insert, metadata, read

__all__ = ["Drained", "Drainer", "Pending", "add", "drain", "forget", "pending", "pending_jobs", "release"]

log = logging.getLogger("pending_jobs")
LEASE = 30.0  # seconds after which rows of a drainer that died are free again
PARKED = math.inf

pending_jobs = Table(
    "pending_jobs",
    metadata,
    Column("id", String(200), primary_key=True),  # the job's id: the same request is the same row
    Column("request", Text, nullable=False),
    Column("correlation_id", String(100), nullable=False),
    Column("accepted_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),  # end of head start, lease or backoff; infinity: parked
    Column("attempts", Integer, nullable=False, default=0),
    Column("claimed_by", String(40)),
    Column("reason", Text),
)
Index("pending_jobs_due", pending_jobs.c.due_at, pending_jobs.c.accepted_at)
row = pending_jobs.c


class Enqueues(Protocol):
    """What is needed of a producer; `producer.Producer` is one."""

    admission: Callable[..., Awaitable[None]] | None

    def bounded(self) -> AbstractAsyncContextManager[None]: ...
    async def enqueue(self, request: JobRequest) -> JobRef: ...
    async def prepared(self, request: JobRequest) -> Outgoing: ...
    def ref(self, request: JobRequest) -> JobRef: ...


@dataclass(frozen=True, slots=True)
class Drained:
    queued: int = 0
    parked: int = 0
    postponed: int = 0
    unavailable: bool = False  # Redis is still away; the rows stay as they were


@dataclass(frozen=True, slots=True)
class Pending:
    """`oldest` in seconds; `parked`: job id -> why it cannot be queued."""

    waiting: int
    oldest: float
    parked: dict[str, str]


async def add(tx: AsyncConnection, producer: Enqueues, request: JobRequest, *, head_start: float) -> JobRef:
    """Store the request in the caller's transaction; drainers leave it alone for `head_start` seconds."""
    ref, now = producer.ref(request), time.time()
    stored = _plain(checked(await producer.prepared(request)))
    values = {
        "id": ref.id,
        "request": json.dumps(stored),
        "correlation_id": current_correlation_id() or new_correlation_id(),
        "accepted_at": now,
        "due_at": now + head_start,
        "attempts": 0,
    }
    await tx.execute(insert(tx, pending_jobs).values(values).on_conflict_do_nothing())
    return ref


def checked(job: Outgoing) -> JobRequest:
    """The request as it can be stored and enqueued later: all of it validated, its payload as JSON."""
    children = [checked(child) for child in job.children]
    return replace(job.request, payload=payload_of(job.data), children=children)


async def forget(store: AsyncEngine, job_id: str) -> None:
    """Its job is in the queue."""
    async with begin(store) as tx:
        await tx.execute(delete(pending_jobs).where(row.id == job_id))


async def drain(store: AsyncEngine, producer: Enqueues, batch: int = 100) -> Drained:
    """Queue the oldest pending requests. Call it every few seconds, from any number of processes."""
    claimer = uuid.uuid4().hex
    queued = parked = postponed = 0
    for waiting in await _claim(store, claimer, batch):
        later: dict[str, Any] = {"claimed_by": None, "attempts": waiting.attempts + 1}
        try:
            with correlation(waiting.correlation_id):
                await producer.enqueue(_request(json.loads(waiting.request), time.time() - waiting.accepted_at))
        except QueueUnavailable:
            await _update(store, row.claimed_by == claimer, {"due_at": time.time(), "claimed_by": None})
            return Drained(queued, parked, postponed, unavailable=True)
        except FailedTwin as twin:  # it was queued, ran and failed: the dead letters have it
            log.warning("a pending request failed already", extra={"fields": {"reason": str(twin)}})
        except Permanent as error:
            parked += 1
            later |= {"due_at": PARKED, "reason": f"{type(error).__name__}: {error}"}
            log.error("a pending request was parked", extra={"fields": {"job_id": waiting.id, **later}})
            await _update(store, row.id == waiting.id, later)
            continue
        except Exception as error:  # Overloaded says when to come back
            postponed += 1
            wait = float(getattr(error, "retry_after", min(60.0, 2.0**waiting.attempts)))
            later |= {"due_at": time.time() + wait, "reason": f"{type(error).__name__}: {error}"}
            await _update(store, row.id == waiting.id, later)
            continue
        await forget(store, waiting.id)
        queued += 1
    return Drained(queued, parked, postponed)


async def pending(store: AsyncEngine) -> Pending:
    waiting = select(func.count(), func.min(row.accepted_at)).where(row.due_at < PARKED)
    async with read(store) as connection:
        count, oldest = (await connection.execute(waiting)).one()
        stuck = await connection.execute(select(row.id, row.reason).where(row.due_at == PARKED).limit(1000))
        parked = {ident: reason or "" for ident, reason in stuck}
    return Pending(count, round(time.time() - oldest, 1) if oldest else 0.0, parked)


async def release(store: AsyncEngine, job_id: str) -> bool:
    """Try a parked request again; False if there is none of this id."""
    again = {"due_at": time.time(), "reason": None, "attempts": 0}
    return await _update(store, (row.id == job_id) & (row.due_at == PARKED), again) > 0


class Drainer(Periodic):
    """Queues what is pending until told to stop; run it beside the workers (`run_until_signalled`)."""

    def __init__(self, store: AsyncEngine, producer: Enqueues, *, every: float = 1.0) -> None:
        super().__init__("queueing what is pending", self._round, every=every)
        self._store, self._producer = store, producer

    async def _round(self) -> bool:
        drained = await drain(self._store, self._producer)
        if drained.queued:
            log.info("queued what was pending", extra={"fields": {"jobs": drained.queued}})
        return drained.queued > 0


async def _claim(store: AsyncEngine, claimer: str, batch: int) -> list[Any]:
    now = time.time()
    async with read(store) as connection:  # an idle drainer must not take SQLite's only writer
        if await connection.scalar(select(row.id).where(row.due_at <= now).limit(1)) is None:
            return []
    oldest = select(row.id).where(row.due_at <= now).order_by(row.accepted_at).limit(batch)
    # The condition stands outside again: PostgreSQL rechecks only that after waiting for another drainer.
    free = (row.id.in_(oldest.with_for_update(skip_locked=True)), row.due_at <= now)
    claim = update(pending_jobs).where(*free).values(due_at=now + LEASE, claimed_by=claimer).returning(*row)
    async with begin(store) as tx:
        return sorted((await tx.execute(claim)).all(), key=lambda claimed: float(claimed.accepted_at))


async def _update(store: AsyncEngine, which: Any, values: Mapping[str, Any]) -> int:
    async with begin(store) as tx:
        return int((await tx.execute(update(pending_jobs).where(which).values(**values))).rowcount)


def _plain(request: JobRequest) -> dict[str, Any]:
    """Every field, so that none added later is lost here."""
    plain = {field.name: getattr(request, field.name) for field in fields(request)}
    return {**plain, "meta": dict(request.meta), "children": [_plain(child) for child in request.children]}


def _request(stored: dict[str, Any], age: float) -> JobRequest:
    """The request as it is now, `age` seconds after it was accepted."""
    delay, max_age = stored["delay"], stored["max_age"]
    overdue = max(0.0, age - delay)
    if max_age is not None and overdue > max_age:
        raise Expired(f"waited {overdue:.0f} s for the queue, worth {max_age:g} s")
    now = {"delay": max(0.0, delay - age), "max_age": max_age and max_age - overdue}
    return JobRequest(**{**stored, **now, "children": [_request(child, age) for child in stored["children"]]})

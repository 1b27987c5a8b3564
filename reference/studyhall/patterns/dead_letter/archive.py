"""Where dead letters live: the table, and how to read it.

Promise: one row per death of a job, with everything Redis knew about it; a job that is replayed and dies
again gets a second row that points to the first, so its history stays whole. `purge` ends it: choose an
age longer than people take to look, and shorter than the idempotency markers are kept, or a replay of an old
dead letter repeats effects.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Float,
    Index,
    Integer,
    Row,
    Table,
    Text,
    and_,
    delete,
    func,
    or_,
    select,
    tuple_,
)
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.failures import Permanent
from ..core.store import begin, metadata, read

__all__ = [
    "DeadLetter",
    "UnknownDeadLetter",
    "counts",
    "dead_letters",
    "find",
    "list_dead_letters",
    "needed_by_dead_letters",
    "purge",
    "reason_of",
    "show",
]

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", Text, primary_key=True),
    Column("queue", Text, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("attempts_made", Integer, nullable=False),
    Column("failed_at", Float, nullable=False),
    Column("archived_at", Float, nullable=False),
    Column("replay_of", Text),  # the dead letter whose replay failed again
    Column("snapshot", Text, nullable=False),  # JSON: the job's Redis fields as they were
    Column("alerted_at", Float),
    Column("alerting_until", Float),
    Column("replayed_at", Float),
    Column("replaying_until", Float),
    Index("dead_letters_job", "queue", "job_id"),
    Index("dead_letters_archived", "archived_at"),
)
_t = dead_letters.c


class UnknownDeadLetter(Permanent):
    """There is no dead letter with this id. List them to see which there are."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One death of one job. Times are seconds since 1970.

    `snapshot` is what Redis held: `fields` (the job's hash), `logs` and, for the parent of a flow,
    `processed` (its children's results) and `waits_for` (the children it still needed).
    """

    id: str
    queue: str
    job_id: str
    name: str
    cause: str  # exhausted | unrecoverable | stalled | malformed | forged
    reason: str
    attempts_made: int
    failed_at: float
    archived_at: float
    replayed_at: float | None
    replay_of: str | None
    snapshot: Mapping[str, Any] = field(repr=False)  # holds the payload: kept out of logs

    @property
    def data(self) -> Any:
        """The job's payload, or None when it does not parse."""
        return parsed(self.snapshot["fields"].get("data"))

    @property
    def correlation_id(self) -> str | None:
        if not isinstance(data := self.data, dict) or "v" not in data:
            return None
        meta = data.get("meta")
        return meta["cid"] if isinstance(meta, dict) and "cid" in meta else self.job_id


async def list_dead_letters(
    store: AsyncEngine, *, queue: str | None = None, replayed: bool = False, limit: int = 50, after: str | None = None
) -> list[DeadLetter]:
    """Newest first. For the next page pass the id of the last one as `after`."""
    state = _t.replayed_at.is_not(None) if replayed else _t.replayed_at.is_(None)
    wanted: list[ColumnElement[bool]] = [state]
    if queue is not None:
        wanted.append(_t.queue == queue)
    if after is not None:
        last = (await show(store, after))[0]
        older = _t.archived_at < last.archived_at
        wanted.append(or_(older, and_(_t.archived_at == last.archived_at, _t.id > last.id)))
    return await find(store, and_(*wanted), limit=limit)


async def show(store: AsyncEngine, dead_letter_id: str) -> list[DeadLetter]:
    """The dead letter, followed by the earlier deaths of the same job, newest first."""
    if not (letters := await find(store, _t.id == dead_letter_id)):
        raise UnknownDeadLetter(f"{dead_letter_id!r}: {UnknownDeadLetter.__doc__}")
    same_job = and_(_t.queue == letters[0].queue, _t.job_id == letters[0].job_id)
    return letters + await find(store, and_(same_job, _t.failed_at < letters[0].failed_at))


async def find(
    store: AsyncEngine, wanted: ColumnElement[bool], *, limit: int = 50, oldest_first: bool = False
) -> list[DeadLetter]:
    """Dead letters by any condition on the columns of `dead_letters`."""
    order = _t.archived_at if oldest_first else _t.archived_at.desc()
    async with read(store) as connection:
        query = select(dead_letters).where(wanted).order_by(order, _t.id).limit(limit)
        return [dead_letter_of(row) for row in await connection.execute(query)]


async def purge(store: AsyncEngine, older_than: float, *, batch: int = 1000) -> int:
    """Forget dead letters archived that many seconds ago, replayed or not. `batch` rows per transaction."""
    aged = _t.archived_at < time.time() - older_than
    oldest = select(_t.id).where(aged).order_by(_t.archived_at).limit(batch)
    deleted = 0
    while True:
        async with begin(store) as tx:
            done = await tx.execute(delete(dead_letters).where(_t.id.in_(oldest)))
        deleted += done.rowcount
        if done.rowcount < batch:
            return deleted
        await asyncio.sleep(0)


def needed_by_dead_letters(store: AsyncEngine) -> Callable[[Sequence[str]], Awaitable[set[str]]]:
    """For `claim_check.needed_by_jobs`: a dead letter may be replayed, so the blobs of its job stay."""

    async def needed(refs: Sequence[str]) -> set[str]:
        owners = {ref: (ref.split("/")[0], ref.split("/")[1]) for ref in refs}
        kept = select(_t.queue, _t.job_id).where(tuple_(_t.queue, _t.job_id).in_(list(owners.values())))
        async with read(store) as connection:
            dead = {(row.queue, row.job_id) for row in await connection.execute(kept)}
        return {ref for ref, owner in owners.items() if owner in dead}

    return needed


def reason_of(store: AsyncEngine) -> Callable[[Any], Awaitable[str | None]]:
    """For `wait_for_result`: why the job of this `JobRef` failed for good, after it has left Redis."""

    async def reason(ref: Any) -> str | None:
        latest = select(_t.reason).where(_t.queue == ref.queue, _t.job_id == ref.id, _t.replayed_at.is_(None))
        async with read(store) as connection:
            why: str | None = await connection.scalar(latest.order_by(_t.failed_at.desc()).limit(1))
        return why

    return reason


def counts(store: AsyncEngine) -> Callable[[float], Awaitable[tuple[int, dict[str, int]]]]:
    """For `health.measure`: how many were not replayed yet, and per queue how many were archived since then."""

    async def counted(since: float) -> tuple[int, dict[str, int]]:
        recent = select(_t.queue, func.count()).where(_t.archived_at > since).group_by(_t.queue)
        waiting = select(func.count()).select_from(dead_letters).where(_t.replayed_at.is_(None))
        async with read(store) as connection:
            total = int(await connection.scalar(waiting) or 0)
            return total, {row[0]: int(row[1]) for row in await connection.execute(recent)}

    return counted


def dead_letter_of(row: Row[*tuple[Any, ...]]) -> DeadLetter:
    names = DeadLetter.__dataclass_fields__
    values = {name: value for name, value in row._mapping.items() if name in names}
    return DeadLetter(**{**values, "snapshot": json.loads(row.snapshot)})


def parsed(text: str | None) -> Any:
    """The JSON value, or None when there is none or it is broken."""
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None

"""Outbox claims: which events a relay may publish now, and what became of them.

Promise: of a subject always the next in line is claimed, by one relay at a time, until its lease ends; a million
published rows, or those in quarantine, cost a claim nothing.

When it does NOT hold: a relay that publishes after its lease ended publishes a second time what another claimed
meanwhile (see `relay`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Double,
    LargeBinary,
    bindparam,
    cast,
    exists,
    func,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.sql.elements import ColumnElement

from ..core.failures import clean_text
from ..core.store import in_one_hop, is_postgres
from .table import BUS, MAX_REASON, NEVER, clock, not_given_up, outbox, unpublished

__all__ = ["BATCH_BYTES", "Claimed", "Failure", "claim", "settle"]

# Of bodies in one batch; a relay needs about four times that while it publishes.
BATCH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row this worker may publish until its lease ends."""

    position: int
    attempts: int  # failed ones so far
    created_at: float
    event_id: str
    subject: str
    body: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Try again after `delay` seconds, or never (None): quarantined."""

    position: int
    reason: str
    delay: float | None
    consume_attempt: bool = True


async def claim(
    store: AsyncEngine,
    worker_id: str,
    limit: int,
    lease: float,
    *,
    destination: str = BUS,
    hold: bool = True,
    max_bytes: int = BATCH_BYTES,
) -> list[Claimed]:
    """Take up to `limit` events, oldest first, for `lease` seconds; of a subject always the next in line.

    Fewer when their bodies reach `max_bytes` before that, but always one.
    """
    statement = _claim(is_postgres(store), hold)
    wanted = {"to": destination, "worker": worker_id, "max": limit, "lease": lease, "bytes": max_bytes}
    if is_postgres(store):  # a transaction by itself: no round trips for BEGIN and COMMIT
        async with store.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            found = (await connection.execute(statement, wanted)).all()
    else:
        found = await in_one_hop(store, lambda tx: tx.execute(statement, wanted).all(), write=True)
    return sorted((Claimed(*row) for row in found), key=lambda row: row.position)


async def settle(
    store: AsyncEngine,
    worker_id: str,
    *,
    published: Sequence[int] = (),
    failed: Sequence[Failure] = (),
    released: Sequence[int] = (),
) -> None:
    """Write down what became of a batch. `released`: not tried, free for anybody at once.

    Published is a fact whoever holds the lease by now, in a transaction of its own; the rest only counts while
    it is still ours.
    """
    now = clock(is_postgres(store))
    ours = outbox.c.claimed_by == worker_id

    def write_published(tx: Connection) -> None:
        done = update(outbox).where(outbox.c.position.in_(published))
        tx.execute(done.values(published_at=now, due_at=0.0, claimed_by=None, reason=None))

    def write_rest(tx: Connection) -> None:
        if released:
            free = update(outbox).where(outbox.c.position.in_(released), ours)
            tx.execute(free.values(due_at=0.0, claimed_by=None))
        for failure in failed:
            again = NEVER if failure.delay is None else now + failure.delay
            spent = outbox.c.attempts + int(failure.consume_attempt)
            row = update(outbox).where(outbox.c.position == failure.position, ours, unpublished)
            reason = clean_text(failure.reason, MAX_REASON)
            tx.execute(row.values(due_at=again, claimed_by=None, attempts=spent, reason=reason))

    if published:
        await in_one_hop(store, write_published, write=True)
    if released or failed:
        await in_one_hop(store, write_rest, write=True)


@cache
def _claim(postgres: bool, hold: bool) -> Any:
    # A query of its own is asked once, a plain expression for every row that is looked at.
    now, row = select(clock(postgres)).scalar_subquery(), outbox.c
    waiting = (row.destination == bindparam("to"), unpublished, not_given_up)
    # A subject with a leased, backing-off or quarantined event is taken as a whole. Asked per row, through the
    # index: as a set (NOT IN, NOT EXISTS) it is read as a whole for every claim, 55 s for 200,000 in quarantine.
    other = outbox.alias("other").c
    same_subject = (other.destination == bindparam("to"), other.subject == row.subject)
    taken = (
        select(literal_column("1"))
        .where(*same_subject, other.published_at.is_(None), other.due_at > now)
        .where(*(() if hold else (other.due_at < literal_column("1e300"),)))
        .limit(1)
        .correlate(outbox)
        .scalar_subquery()
    )
    size = func.octet_length(row.body) if postgres else func.length(cast(row.body, LargeBinary))
    free = (
        select(row.position, row.subject, size.label("size"))
        # The sum hides the column from the planners: by position a batch is found without sorting the backlog,
        # and they see that only with statistics.
        .where(*waiting, row.due_at + 0.0 <= now, taken.is_(None))
        .order_by(row.position)
        .limit(bindparam("max"))
        .with_for_update(skip_locked=True)  # PostgreSQL only; SQLite has one writer at a time
        .cte("free")
    )
    before = func.sum(free.c.size).over(order_by=free.c.position) - free.c.size
    sized = select(free.c.position, before.label("before")).cte("sized")
    few = select(sized.c.position).where(sized.c.before < bindparam("bytes"))
    chosen: list[ColumnElement[bool]] = [row.position.in_(few)]
    if postgres:
        # What SKIP LOCKED skipped is being claimed by somebody else right now: its successors are not ours.
        last = select(func.max(free.c.position)).scalar_subquery()
        skipped = (
            select(row.subject, row.position)
            .where(*waiting, row.position <= last, row.position.not_in(select(free.c.position)))
            .where(row.subject.in_(select(free.c.subject)).is_(true()))  # IS TRUE: a hashed set, never a loop
            .order_by(row.position)  # for the planner, as above
            .cte("skipped")
            .prefix_with("MATERIALIZED")  # once, not once per row
        )
        chosen.append(~exists().where(skipped.c.subject == row.subject, skipped.c.position < row.position))
    return (
        update(outbox)
        .where(*chosen)
        .values(due_at=now + bindparam("lease", type_=Double), claimed_by=bindparam("worker"))
        .returning(row.position, row.attempts, row.created_at, row.event_id, row.subject, row.body)
    )

"""Outbox claims: which events a relay may publish now, and what became of them.

Promise: a subject's events are claimed in order, by one relay at a time, until its lease ends. A million published
rows, or those in quarantine, cost a claim nothing. Nor do events held behind them: once passing over them takes
more than a second, it is done seldom (`Search`).

When it does NOT hold: a relay that publishes after its lease ended duplicates what another claimed meanwhile (see
`relay`). While hundreds of thousands of events are held, one that is requeued or retried among them may wait
`LONGEST_SEARCH_PAUSE`.
"""

import time
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
from ..core.store import in_one_hop, is_postgres, read
from .table import BUS, MAX_REASON, NEVER, clock, not_given_up, outbox, unpublished

__all__ = ["BATCH_BYTES", "Claimed", "Failure", "Search", "claim", "settle"]

# Of bodies in one batch; a relay needs about four times that while it publishes.
BATCH_BYTES = 8 * 1024 * 1024
QUICK_SEARCH = 1.0  # seconds: a claim that is faster searches the whole backlog every time
SEARCH_SHARE = 0.1  # of a relay's time for searching held events, unless the pause is at its longest
LONGEST_SEARCH_PAUSE = 10.0


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


class Search:
    """Where a relay begins to look, so that it does not pass over 200,000 held events again with every claim.

    After a slow claim the next ones begin where that one found the first free event. They skip subjects
    with any older event, so the order holds.
    """

    def __init__(self) -> None:
        self._after, self._all_again_at, self._slow = 0, 0.0, False

    async def claim(self, store: AsyncEngine, *args: Any, destination: str = BUS, **options: Any) -> list[Claimed]:
        begun = time.monotonic()
        everything = begun >= self._all_again_at
        # Before the search: what is committed during it must not count as passed over.
        newest = await _newest(store, destination) if everything and self._slow else 0
        after = 0 if everything else self._after
        claimed = await claim(store, *args, destination=destination, after=after, **options)
        if claimed or everything:
            self._after = claimed[0].position - 1 if claimed else newest
        if everything:
            took = time.monotonic() - begun
            self._slow = took > QUICK_SEARCH
            self._all_again_at = begun + took + min(took / SEARCH_SHARE, LONGEST_SEARCH_PAUSE) * self._slow
        return claimed


async def claim(
    store: AsyncEngine,
    worker_id: str,
    limit: int,
    lease: float,
    *,
    destination: str = BUS,
    hold: bool = True,
    max_bytes: int = BATCH_BYTES,
    after: int = 0,
) -> list[Claimed]:
    """Take up to `limit` events, oldest first, for `lease` seconds; each subject's in order.

    Fewer when their bodies reach `max_bytes` first, but at least one. `after` a position: only of subjects whose
    unpublished events are all younger and were never tried.
    """
    statement = _claim(is_postgres(store), hold, after > 0)
    wanted = {"to": destination, "worker": worker_id, "max": limit, "lease": lease, "bytes": max_bytes}
    if after:
        wanted["after"] = after
    if is_postgres(store):  # a transaction by itself: no round trips for BEGIN and COMMIT
        async with store.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            rows = (await connection.execute(statement, wanted)).all()
    else:
        rows = await in_one_hop(store, lambda tx: tx.execute(statement, wanted).all(), write=True)
    return sorted((Claimed(*row) for row in rows), key=lambda row: row.position)


async def settle(
    store: AsyncEngine,
    worker_id: str,
    *,
    published: Sequence[int] = (),
    failed: Sequence[Failure] = (),
    released: Sequence[int] = (),
) -> None:
    """Record the outcome of a batch. `released`: not tried, free for anybody at once.

    What was published is recorded whoever holds the lease by now, in its own transaction; the rest only while the
    lease is still ours.
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


async def _newest(store: AsyncEngine, destination: str) -> int:
    waiting = (outbox.c.destination == destination, unpublished, not_given_up)
    last = select(outbox.c.position).where(*waiting).order_by(outbox.c.position.desc()).limit(1)
    async with read(store) as connection:
        return await connection.scalar(last) or 0


@cache
def _claim(postgres: bool, hold: bool, younger: bool = False) -> Any:
    # A subquery is evaluated once, a plain expression for every row.
    now, row = select(clock(postgres)).scalar_subquery(), outbox.c
    waiting = [row.destination == bindparam("to"), unpublished, not_given_up]
    if younger:
        waiting.append(row.position > bindparam("after"))
    # A subject with a leased, backing-off or quarantined event is taken as a whole. Checked per row, through the
    # index: as a set (NOT IN, NOT EXISTS) all of it is read for every claim, 55 s for 200,000 in quarantine.
    other = outbox.alias("other").c
    same_subject = (other.destination == bindparam("to"), other.subject == row.subject)
    taken = (
        select(literal_column("1"))
        .where(*same_subject, other.published_at.is_(None), other.due_at > (0.0 if younger else now))
        .where(*(() if hold else (other.due_at < literal_column("1e300"),)))
        .limit(1)
        .correlate(outbox)
        .scalar_subquery()
    )
    free_at_all = [row.due_at + 0.0 <= now, taken.is_(None)]
    if younger:
        # In a subquery: a constant would prove that `outbox_to_publish` holds the row, and a planner with the
        # statistics of an empty table would then walk through all waiting rows.
        at_once = other.due_at == select(literal_column("0.0")).scalar_subquery()
        older: Any = select(literal_column("1")).where(*same_subject, other.published_at.is_(None), at_once)
        older = older.where(other.position <= bindparam("after")).limit(1).correlate(outbox)
        free_at_all.append(older.scalar_subquery().is_(None))
    size = func.octet_length(row.body) if postgres else func.length(cast(row.body, LargeBinary))
    free = (
        select(row.position, row.subject, size.label("size"))
        # The sum hides the column from the planners: by position a batch is found without sorting the backlog,
        # and they see that only with statistics.
        .where(*waiting, *free_at_all)
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
        # What SKIP LOCKED skipped is being claimed by another relay right now: its successors are not ours.
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

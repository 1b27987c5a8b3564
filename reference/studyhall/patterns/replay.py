"""Replay: one consumer gets past events again; nobody else notices.

Promise: events are read from the outbox (which keeps them until purge) in their old order and handed to ONE
consumer's effect, never to the bus. Events that it already had are skipped, so replaying too much is
safe, even while the consumer runs. With `force` they are applied again, and their markers renewed in the
transaction of the effect. A failing event holds back the later ones of its subject and is reported; the others go on.

When it does NOT hold
- Purged events are gone: keep the outbox (or the broker's log) as long as you may want to replay.
- `force` repeats effects on purpose. Use it for a projection that was rebuilt from empty, never for a
  charge.
- A consumer that runs meanwhile may apply newer events before the replayed older ones. Pause it, or make
  its effect indifferent to order.
"""

import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .core.event import Event
from .core.store import begin, insert, read
from .idempotency import Inbox, fingerprint, inbox
from .outbox import BUS, outbox

__all__ = ["ReplayReport", "logged", "replay"]

Effect = Callable[[AsyncConnection, Event], Awaitable[Any]]


@dataclass(slots=True)
class ReplayReport:
    """What a replay did. `failed`: event id → reason; `held`: ids behind a failed one of the same subject."""

    read: int = 0
    applied: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


async def logged(
    store: AsyncEngine,
    *,
    after: int = 0,
    until: int | None = None,
    since: datetime | None = None,
    before: datetime | None = None,
    ids: Sequence[str] | None = None,
    destination: str = BUS,
    batch: int = 500,
) -> AsyncIterator[Event]:
    """Published events by position (after, until], by time of `add` [since, before) or by id, in order."""
    row = outbox.c
    chosen = [row.destination == destination, row.published_at.is_not(None), row.reason.is_(None)]
    chosen += [row.position <= until] if until is not None else []
    chosen += [row.created_at >= since.timestamp()] if since is not None else []
    chosen += [row.created_at < before.timestamp()] if before is not None else []
    chosen += [row.event_id.in_(ids)] if ids is not None else []
    while True:
        page = select(row.position, row.body).where(*chosen, row.position > after)
        async with read(store) as connection:
            rows = (await connection.execute(page.order_by(row.position).limit(batch))).all()
        for position, body in rows:
            after = position
            yield Event.decode(body, max_bytes=len(body) * 4)
        if len(rows) < batch:
            return


async def replay(
    store: AsyncEngine, consumer: str, events: AsyncIterable[Event], effect: Effect, *, force: bool = False
) -> ReplayReport:
    """Hand the events to this consumer's effect, one transaction each. Can be repeated at will."""
    report = ReplayReport()
    stuck: set[str] = set()
    run = _again if force else _unless_done
    async for event in events:
        report.read += 1
        if event.subject in stuck:
            report.held.append(event.id)
            continue
        try:
            applied = await run(store, consumer, event, effect)
        except Exception as error:
            stuck.add(event.subject)
            report.failed[event.id] = f"{type(error).__name__}: {error}"[:500]
        else:
            report.applied += applied
            report.skipped += not applied
    return report


async def _unless_done(store: AsyncEngine, consumer: str, event: Event, effect: Effect) -> bool:
    """Under the marker that `inbox.handle_once` would set; False: it is set already."""
    applied = False

    async def apply(tx: AsyncConnection) -> Any:
        nonlocal applied
        applied = True
        return await effect(tx, event)

    await Inbox(store, consumer).once(event.id, fingerprint(event.fact), apply)
    return applied


async def _again(store: AsyncEngine, consumer: str, event: Event, effect: Effect) -> bool:
    marker = {"consumer": consumer, "key": event.id}
    new = {"fingerprint": fingerprint(event.fact), "result": "null", "at": time.time()}
    async with begin(store) as tx:
        # First, whether or not it exists: a live delivery waits for our commit, or we for its.
        upsert = insert(tx, inbox).values(**marker, **new)
        await tx.execute(upsert.on_conflict_do_update(index_elements=list(marker), set_=new))
        result = json.dumps(await effect(tx, event))
        await tx.execute(inbox.update().filter_by(**marker).values(result=result))
    return True

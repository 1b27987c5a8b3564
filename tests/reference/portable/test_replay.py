"""One consumer gets past events again, in order; what it had is skipped."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.outbox.table import add, outbox
from studyhall.patterns.replay import logged, replay


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


async def published(store: AsyncEngine, *idents: str) -> None:
    for ident in idents:
        async with begin(store) as tx:
            await add(tx, Event(id=ident, source="/shop", type="order.placed.v1", subject="order-7"))
            await tx.execute(update(outbox).values(published_at=1.0))


async def test_what_was_missed_is_applied_and_what_was_had_is_skipped_unless_forced(store: AsyncEngine):
    await published(store, "a", "b", "c")
    applied: list[str] = []

    async def effect(tx: AsyncConnection, event: Event) -> None:
        applied.append(event.id)

    report = await replay(store, "revenue", logged(store, ids=["b"]), effect)
    assert (report.applied, applied) == (1, ["b"])
    report = await replay(store, "revenue", logged(store), effect)
    assert (report.applied, report.skipped, applied) == (2, 1, ["b", "a", "c"])
    await replay(store, "revenue", logged(store), effect, force=True)
    assert applied[3:] == ["a", "b", "c"]

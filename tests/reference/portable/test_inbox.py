"""However often an event comes, its effect is committed once per consumer."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.inbox import handle_once


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


async def test_an_event_takes_effect_once_for_each_consumer(store: AsyncEngine):
    applied: list[str] = []

    async def effect(tx: AsyncConnection, event: Event) -> str:
        applied.append(event.subject)
        return "counted"

    event = Event(id="e-1", source="/shop", type="order.placed.v1", subject="order-7")
    for _ in range(3):
        assert await handle_once(store, "revenue", event, effect) == "counted"
    await handle_once(store, "mails", event, effect)
    assert applied == ["order-7", "order-7"]


async def test_an_effect_that_fails_leaves_no_marker(store: AsyncEngine):
    async def fails(tx: AsyncConnection, event: Event) -> str:
        raise RuntimeError("no")

    async def works(tx: AsyncConnection, event: Event) -> str:
        return "yes"

    event = Event(id="e-2", source="/shop", type="order.placed.v1", subject="order-8")
    with pytest.raises(RuntimeError):
        await handle_once(store, "revenue", event, fails)
    assert await handle_once(store, "revenue", event, works) == "yes"

"""One event, a delivery for each of its queues, in the transaction that made it true."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.fan_out import FanOut, destination_of
from studyhall.patterns.outbox.table import outbox


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


FAN_OUT = FanOut({"order.placed": ["mails", "payouts"]})


def placed(order: str) -> Event:
    return Event(id=f"placed-{order}", source="/shop", type="order.placed.v1", subject=order)


async def rows(store: AsyncEngine) -> list[tuple[str, str]]:
    async with read(store) as tx:
        sent = await tx.execute(select(outbox.c.destination, outbox.c.event_id).order_by(outbox.c.position))
        return [(row.destination, row.event_id) for row in sent]


async def test_all_queues_or_none_and_a_caller_that_retries_adds_nothing(store: AsyncEngine):
    for deliveries in (2, 0):
        async with begin(store) as tx:
            assert await FAN_OUT.add(tx, placed("7")) == deliveries

    async def rolled_back() -> None:
        async with begin(store) as tx:
            await FAN_OUT.add(tx, placed("8"))
            raise RuntimeError("the order was refused")

    with pytest.raises(RuntimeError):
        await rolled_back()
    wanted = [(destination_of(queue), "placed-7") for queue in ("mails", "payouts")]
    assert await rows(store) == wanted

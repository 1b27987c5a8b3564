"""What commits is published in order, what rolls back never is."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from harness.waiting import until
from studyhall.patterns.core.event import BrokerUnavailable, Event
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.outbox.table import add


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


class Bus:
    def __init__(self) -> None:
        self.away, self.published = False, list[str]()

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        if self.away:
            return [BrokerUnavailable("away") for _ in events]
        self.published += [event.id for event in events]
        return [None for _ in events]


def event(ident: str) -> Event:
    return Event(id=ident, source="/shop", type="order.placed.v1", subject="order-7")


async def test_committed_events_are_published_once_and_an_outage_is_waited_out(store: AsyncEngine):
    bus = Bus()
    relay = Relay(store, bus, policy=RetryPolicy(base=0.001, cap=0.001))
    for ident in ("a", "b"):
        async with begin(store) as tx:
            await add(tx, event(ident))

    async def rolled_back() -> None:
        async with begin(store) as tx:
            await add(tx, event("never"))
            raise RuntimeError("the order was refused")

    with pytest.raises(RuntimeError):
        await rolled_back()
    bus.away = True
    await relay.run_once()
    assert bus.published == []
    bus.away = False

    async def all_out() -> bool:
        await relay.run_once()
        return bus.published == ["a", "b"]

    await until(all_out, 20)
    assert await relay.run_once() == 0

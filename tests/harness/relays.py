"""What the suites of the outbox share: a publisher that remembers, a relay that runs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.event import Event
from studyhall.patterns.core.store import begin
from studyhall.patterns.outbox import add
from studyhall.patterns.outbox.relay import Relay


class Sink:
    """Records what it accepts; `verdict` may refuse an event or, by raising, the whole batch."""

    def __init__(self, verdict: Callable[[Event], Exception | None] = lambda _: None) -> None:
        self.verdict = verdict
        self.events: list[Event] = []
        self.at: dict[str, float] = {}

    @property
    def ids(self) -> list[str]:
        return [event.id for event in self.events]

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        results = [self.verdict(event) for event in events]
        for event, refused in zip(events, results, strict=True):
            if refused is None:
                self.events.append(event)
                self.at[event.id] = time.perf_counter()
        return results


@asynccontextmanager
async def running(relay: Relay, within: float = 10) -> AsyncIterator[asyncio.Task[None]]:
    """`within`: seconds to end after `stop`."""
    task = asyncio.create_task(relay.run())
    try:
        yield task
    finally:
        relay.stop()
        await asyncio.wait_for(task, within)


async def put(store: AsyncEngine, *events: Event) -> None:
    async with begin(store) as tx:
        await add(tx, *events)

"""Event bus: one small interface over four brokers, each of which declares what it can promise.

Promise: an event that `publish` accepted reaches every subscribed group at least once. It is acknowledged
only after its handler returned; a failing one comes back with backoff, a bounded number of times, and then
stays in the group's quarantine with the reason, to be replayed to that group alone. A poison
event delays only itself and, where order is kept, what `poison_delays` says. A connection that breaks, or that
swallows every byte, is replaced within 20 seconds, and neither ends a handler nor starts a second run of it.
The bound counts handlers that raise and those that kill their process, across restarts of consumers and broker.

When it does NOT hold
- Not exactly once: a process that dies between effect and acknowledgement sees the event again. Record
  (event id, group) together with the effect (inbox).
- An entry of `publish` that is an exception means "not known to be stored": it may have landed. Publish it
  again, and let the inbox, or the broker where `dedup_window` is above 0, drop the second copy.
- A process that dies counts for every event that it had in hand. On Kafka its first death counts for none.
- A renamed group is a new one: it gets the retained past again (on RabbitMQ nothing). Keep its inbox's name, and no
  effect repeats. The old group stays on the broker with backlog and quarantine, and goes on collecting: consume it
  until its `lag` is 0, then delete it there.
- What somebody else, or retention, removes unread is lost: Redis and Kafka count it (`bus.trimmed`: alert on it),
  RabbitMQ and NATS keep no trace of it.
- What a broker cannot do is in its `Capabilities`, and the conformance suite checks the gaps as well.

Topic = first word of the event's type (`order.placed.v2` → `order`): everything that happens to one kind of
aggregate shares a channel, because order between `placed` and `cancelled` is lost when they travel apart.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from ..core.event import BrokerUnavailable, Event, Handler, InvalidEvent, topic_of
from ..core.job import RetryPolicy

__all__ = ["EVENTS", "BrokerUnavailable", "Capabilities", "EventBus", "Handler", "Quarantined", "topic_of"]

EVENTS = RetryPolicy(base=0.5, cap=30, attempts=5)  # deliveries before quarantine, and the backoff in between


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one adapter promises. `limits` says in words what it cannot."""

    broker: str
    groups: bool = True  # every group gets every event, its members share them
    replay_from_start: bool = True  # a group that subscribes late gets what was published before
    ordered_per_key: bool = False  # events with one subject reach a group in publish order, one at a time
    poison_delays: Literal["itself", "its key", "its partition"] = "itself"  # what waits for a failing event
    dedup_window: float = 0.0  # seconds in which a second publish of an id is dropped; 0: never dropped
    transactions: bool = False  # publish and acknowledge as one unit
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An event a group gave up on. `body` is what was on the wire, even when it is not an event at all."""

    id: str  # of this quarantine entry: the argument of `replay_quarantined`
    topic: str
    body: str
    reason: str
    deliveries: int
    at: datetime

    @property
    def event(self) -> Event | None:
        try:
            return Event.decode(self.body)
        except InvalidEvent:
            return None


class EventBus(Protocol):
    """`subscribe` before the first `publish` where `replay_from_start` is False, elsewhere at any time."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        """One entry per event, in order: None = durably accepted, else why not."""
        ...

    async def subscribe(self, group: str, topics: Sequence[str]) -> None:
        """Make the group durable without consuming yet. Idempotent."""
        ...

    async def consume(
        self,
        group: str,
        topics: Sequence[str],
        handler: Handler,
        *,
        stop: asyncio.Event,
        concurrency: int = 16,
        policy: RetryPolicy = EVENTS,
        time_limit: float = 60.0,
    ) -> None:
        """Run until `stop` is set, then finish what is in flight and return. Outlives broker outages."""
        ...

    async def quarantined(self, group: str, limit: int = 100) -> list[Quarantined]: ...

    async def replay_quarantined(self, group: str, ids: Sequence[str]) -> int:
        """Deliver these again to this group alone, with fresh attempts. Returns how many there were."""
        ...

    async def lag(self, group: str) -> int:
        """Events this group has not finished yet."""
        ...

    async def close(self) -> None: ...

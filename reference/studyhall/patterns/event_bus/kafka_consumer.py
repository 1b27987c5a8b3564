"""One member of a Kafka consumer group that runs events side by side and still commits only what is settled.

Promise: the committed offset of a partition never passes an event whose handler has not answered. A slow handler
does not cost the membership (polling goes on meanwhile), and a rebalance waits for handlers that are running.

Kafka counts no deliveries, so each commit carries in its metadata how far its partition was read, whether it was
released, and the attempts of unsettled events. A member that takes over an unreleased partition knows that its owner
died, and records every start up to there before the handler runs: a crash then counts for the events that ran.

When it does NOT hold: events done behind a partition's oldest unsettled one come again after a rebalance (the inbox
drops them). A process that is frozen for longer than the session timeout is replaced, and finishes the
handlers it was in next to its successor. The first crash of a series counts for no event, and none counts
while the brokers take no commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from ..core.event import Handler
from ..core.failures import JobError
from ..core.job import RetryPolicy
from .delivery import Lanes, judge, log, set_within, text

__all__ = ["KafkaMember", "headers_of"]

POLL = 0.2  # seconds; also how long an idle member needs to notice `stop`
HASTE = 0.02  # seconds, while starts wait to be recorded between two polls
WINDOW = 2_000  # events in memory, running or in backoff, before reading pauses
REBALANCE_PATIENCE = 30.0  # seconds a rebalance waits for running handlers
COMMIT_PATIENCE = 5.0  # seconds, for the last commit of a partition that is released
PASSING = (KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION)
MOST_COUNTED = 200  # events of a partition; brokers take 4,096 bytes of metadata
METADATA = re.compile(r"(held|left) (\d+)((?: \d+:\d+)*)")
Place = tuple[str, int]


def headers_of(message: Any) -> dict[str, bytes]:
    return dict(message.headers() or [])


@dataclass
class Partition:
    """Which of the offsets read so far are unsettled. `gone`: no longer ours, or we are stopping."""

    open: set[int] = field(default_factory=set)
    tried: dict[int, int] = field(default_factory=dict)  # attempts begun, beyond those in the event's headers
    suspects_end: int = 0  # if the last owner died, what killed it lies before this
    start: int = -1  # what was committed when it was assigned
    next: int = -1
    running: int = 0
    committed: tuple[int, str] = (-1, "")
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def taken_over(cls, offset: int, metadata: str | None) -> Partition:
        if offset < 0 or not (match := METADATA.fullmatch(metadata or "")):
            return cls(start=offset)
        counts = (pair.split(":") for pair in match[3].split())
        return cls(
            tried={offset + int(at): int(count) for at, count in counts},
            suspects_end=offset + int(match[2]) if match[1] == "held" else 0,
            start=offset,
        )

    def read(self, offset: int) -> None:
        self.open.add(offset)
        self.next = offset + 1

    def settled_up_to(self) -> int:
        return min(self.open, default=self.next)

    def position(self) -> tuple[int, str]:
        """Offset and metadata of a commit."""
        offset = self.settled_up_to()
        released = self.gone.is_set() and offset >= self.suspects_end
        tried = sorted((at, count) for at, count in list(self.tried.items()) if count)[:MOST_COUNTED]
        counts = (f" {at - offset}:{count}" for at, count in tried)
        end = max(self.next, self.suspects_end)
        return offset, f"{'left' if released else 'held'} {end - offset}{''.join(counts)}"


@dataclass
class KafkaMember:
    consumer: Consumer
    topics: Mapping[str, str]  # Kafka topic → event topic
    retry_topic: Callable[[str], str]
    dead_topic: Callable[[str], str]
    produce: Callable[[str, Any, bytes, dict[str, Any]], Awaitable[None]]
    trimmed: Callable[[str, int], None]
    handler: Handler
    stop: asyncio.Event
    ordered: bool
    slots: asyncio.Semaphore
    policy: RetryPolicy
    time_limit: float
    _places: dict[Place, Partition] = field(default_factory=dict)
    _lanes: Lanes = field(default_factory=Lanes)
    _pulled: list[Any] = field(default_factory=list)
    _paused: bool = False
    _unrecorded: list[tuple[Partition, int, int, asyncio.Future[None]]] = field(default_factory=list)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        # One thread for every call: rebalance callbacks then never meet a half-done commit.
        with ThreadPoolExecutor(1, thread_name_prefix="kafka-consumer") as self._thread:
            self.consumer.subscribe(
                list(self.topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )
            try:
                while not self.stop.is_set():
                    messages = await self._in_thread(self._pull)
                    for message in messages:
                        self._place(message).read(message.offset())
                    # Before the first of them starts: if it kills us, the next owner must know how far we got.
                    await self._record()
                    for message in messages:
                        self._start(message)
                await self._let_go(list(self._places))
            finally:
                await self._lanes.abort()
                with contextlib.suppress(KafkaException):
                    await self._in_thread(self._commit_last)
                await self._in_thread(self.consumer.close)

    # in the consumer's thread

    def _pull(self) -> list[Any]:
        room = WINDOW - len(self._lanes.tasks)
        if (room <= 0) != self._paused:  # paused, not left alone: a member that stops polling is thrown out
            self._paused = room <= 0
            change = self.consumer.pause if self._paused else self.consumer.resume
            change(self.consumer.assignment())
        suspicious = any(place.settled_up_to() < place.suspects_end for place in self._places.values())
        self._pulled, wait = [], HASTE if suspicious else POLL
        # One by one: a rebalance between two of them removes what was pulled before it, and nothing that came after.
        while len(self._pulled) <= max(1, min(room, 500)) and (message := self.consumer.poll(wait)) is not None:
            wait = 0.0
            if message.error() is None:
                self._pulled.append(message)
            else:
                log.warning("Kafka: %s", message.error())
        self._notice_gaps(self._pulled)
        return self._pulled

    def _notice_gaps(self, messages: list[Any]) -> None:
        """Offsets that nobody read and that the broker no longer has: retention, or somebody deleted them."""
        expected: dict[Place, int] = {}
        for each in messages:
            where, offset = (each.topic(), each.partition()), each.offset()
            place = self._place(each)
            missed = expected.get(where, place.start if place.next < 0 else place.next)
            if 0 <= missed < offset:  # or the markers of other people's transactions
                with contextlib.suppress(KafkaException):
                    low, _ = self.consumer.get_watermark_offsets(TopicPartition(*where), timeout=COMMIT_PATIENCE)
                    if low > missed:
                        self.trimmed(each.topic(), min(low, offset) - missed)
            expected[where] = offset + 1

    def _commit(self) -> bool:
        """False: refused by a rebalance that will pass."""
        ready = []
        for (topic, number), place in list(self._places.items()):
            if place.next >= 0 and (position := place.position()) != place.committed:
                ready.append(TopicPartition(topic, number, position[0], position[1]))
        if ready:
            try:
                self.consumer.commit(offsets=ready, asynchronous=False)
            except KafkaException as error:  # tried again with the next poll; at worst events come twice
                log.warning("Kafka did not take a commit: %s", error)
                return error.args[0].code() not in PASSING
            for each in ready:
                if place_ := self._places.get((each.topic, each.partition)):
                    place_.committed = each.offset, each.metadata or ""
        return True

    def _commit_last(self) -> None:
        """No next poll will repeat it: what was done before a rebalance would be done again after it."""
        deadline = time.monotonic() + COMMIT_PATIENCE
        while not self._commit() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _assigned(self, consumer: Consumer, gained: list[Any]) -> None:
        try:
            gained = consumer.committed(gained, timeout=10)
        except KafkaException as error:
            log.warning("Kafka did not say what was committed, attempts start again: %s", error)
            return
        for each in gained:
            self._places[each.topic, each.partition] = Partition.taken_over(each.offset, each.metadata)

    def _revoked(self, consumer: Consumer, lost: list[Any]) -> None:
        places = [(each.topic, each.partition) for each in lost]
        done = asyncio.run_coroutine_threadsafe(self._let_go(places), self._loop)
        with contextlib.suppress(TimeoutError):
            done.result(REBALANCE_PATIENCE)
        self._commit_last()
        self._lost(consumer, lost)

    def _lost(self, consumer: Consumer, lost: list[Any]) -> None:
        gone = {(each.topic, each.partition) for each in lost}
        # Their next owner reads them again; that may be us, in this very pull.
        self._pulled = [each for each in self._pulled if (each.topic(), each.partition()) not in gone]
        for each in lost:
            if place := self._places.pop((each.topic, each.partition), None):
                self._loop.call_soon_threadsafe(place.gone.set)

    # in the event loop

    async def _let_go(self, places: list[Place]) -> None:
        """Running handlers end, waiting events are left to the next owner."""
        revoked = [place for each in places if (place := self._places.get(each))]
        for place in revoked:
            place.gone.set()
        while any(place.running for place in revoked):
            await asyncio.sleep(0.01)

    async def _record(self) -> None:
        """Commit, then start the handlers that waited for it."""
        waiting, self._unrecorded = self._unrecorded, []
        for place, offset, begun, _ in waiting:
            place.tried[offset] = begun
        await self._in_thread(self._commit)
        for *_, recorded in waiting:
            if not recorded.done():
                recorded.set_result(None)

    def _place(self, message: Any) -> Partition:
        return self._places.setdefault((message.topic(), message.partition()), Partition())

    def _start(self, message: Any) -> None:
        place = self._place(message)
        key = f"{message.topic()} {message.partition()} {text(message.key())}" if self.ordered else None
        self._lanes.start(key, lambda: self._work(place, message))

    async def _work(self, place: Partition, message: Any) -> None:
        headers, offset = headers_of(message), message.offset()
        before = int(headers.get("spent", 0))
        deliveries = before + place.tried.get(offset, 0) + 1
        wait = float(headers.get("due", 0)) - time.time()
        while not (wait > 0 and await set_within(place.gone, wait)):
            async with self.slots:
                if offset < place.suspects_end:
                    recorded = self._loop.create_future()
                    self._unrecorded.append((place, offset, deliveries - before, recorded))
                    await recorded
                if place.gone.is_set():
                    return  # not settled, so not committed: the next owner gets it
                place.running += 1
                try:
                    again = await self._once(place, message, deliveries)
                finally:
                    place.running -= 1
            if again is None:
                return
            wait, spent = again
            deliveries += spent
            place.tried[offset] = deliveries - before - 1

    async def _once(self, place: Partition, message: Any, deliveries: int) -> tuple[float, int] | None:
        """None when the event is settled, else (seconds to wait, attempts consumed) before the next try in place."""
        body, topic = message.value() or b"", self.topics[message.topic()]
        verdict = await judge(self.handler, body, deliveries, self.policy, self.time_limit)
        if verdict is not None:
            spent = int(verdict.consume_attempt)
            if verdict.delay is not None and self.ordered:
                return verdict.delay, spent
            facts: dict[str, Any]
            if verdict.delay is not None:
                due = time.time() + verdict.delay
                target, facts = self.retry_topic(topic), {"spent": deliveries - 1 + spent, "due": due}
            else:
                target, facts = self.dead_topic(topic), {"reason": verdict.reason, "deliveries": deliveries}
            try:
                await self.produce(target, message.key(), body, {"topic": topic, **facts})
            except JobError as error:
                log.warning("Kafka did not take an event into %s, trying again: %s", target, error)
                return 1.0, 0
            if verdict.delay is None:
                log.warning("quarantined an event of %s: %s", message.topic(), verdict.reason)
        place.open.discard(message.offset())
        place.tried.pop(message.offset(), None)
        return None

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await self._loop.run_in_executor(self._thread, work)

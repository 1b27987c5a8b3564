"""Event bus on Kafka: idempotent producer, keyed partitions, commits after the handler, retry and dead topics.

Promise, beyond `event_bus`: an offset is committed only when every event up to it is settled, and a partition is
released in a rebalance only after its running handlers ended. `ordered=True` keeps order per subject: a failed
event is tried again in place and holds up its own subject alone; otherwise it moves to the group's retry topic
with its count and due time, so that nothing waits for it.

When it does NOT hold
- An event that kills its process does so once more than it has attempts: the first death of a series counts for none.
- A crash redelivers everything behind the oldest unsettled event of a partition: inbox.
- The idempotent producer drops its own repeats, not a second publish of an event by the application.
- A broker that confirmed alone and lost its disk has lost the event: run three, with `min.insync.replicas=2`.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from ..core.event import BrokerUnavailable, Event, Handler, topic_of
from ..core.job import RetryPolicy
from .bus import EVENTS, Capabilities, Quarantined
from .delivery import checked_name, encoded, log, pauses, report_trimmed, text
from .kafka_consumer import KafkaMember, headers_of

__all__ = ["KafkaBus"]

T = TypeVar("T")


class KafkaBus:
    """`config` goes to every client (TLS, SASL). `create_topics=False` where brokers or operators create them.
    `replication=-1`: the brokers' default."""

    def __init__(
        self,
        bootstrap: str,
        *,
        prefix: str = "events",
        ordered: bool = False,
        partitions: int = 6,
        replication: int = -1,
        create_topics: bool = True,
        confirm_within: float = 10.0,
        session_timeout: float = 10.0,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.prefix, self.ordered = prefix, ordered
        self.partitions, self.replication, self.create_topics = partitions, replication, create_topics
        self.confirm_within, self.session_timeout = confirm_within, session_timeout
        self._config = {
            "bootstrap.servers": bootstrap,
            "log_level": 2,
            # An unanswered request ends its connection: after a minute with librdkafka's default.
            "socket.timeout.ms": 10_000,
            **(config or {}),
        }
        self.trimmed = 0  # events removed before a group of this process read them: alert on it
        self._known: set[str] = set()
        self._producer: Producer | None = None
        self._closed = threading.Event()
        self.capabilities = Capabilities(
            broker="kafka",
            ordered_per_key=ordered,
            poison_delays="its key" if ordered else "itself",
            limits=(
                "the first death of a process that an event kills counts for no event",
                "a second publish of an id is delivered twice: the idempotent producer only knows its own repeats",
                "2,000 events in backoff make a member stop reading retries (ordered: with those behind them, all)",
                "dead topics only grow: a replayed entry is marked, not removed",
                "an entry that two replay at the same moment is delivered twice",
            ),
        )

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        bodies = [encoded(event) for event in events]
        # Not the topics of refused events: asking for one illegal name fails all.
        topics = {self._topic(topic_of(e)) for e, body in zip(events, bodies, strict=True) if isinstance(body, bytes)}
        try:
            await self._ensure(topics)
        except KafkaException as error:
            return [self._unconfirmed(error) if isinstance(body, bytes) else body for body in bodies]
        return list(await asyncio.gather(*map(self._send, events, bodies)))

    async def subscribe(self, group: str, topics: Sequence[str]) -> None:
        checked_name(group)
        names = [name for topic in map(checked_name, topics) for name in self._names(group, topic)]
        await self._ensure(names)

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
        async for _ in pauses(stop):
            try:
                await self.subscribe(group, topics)
                break
            except KafkaException as error:
                log.warning("group %s cannot reach Kafka, trying again: %s", group, error)
        if stop.is_set():
            return
        slots = asyncio.Semaphore(concurrency)
        running = []
        for number, group_id in enumerate(self._groups(group)):
            member = KafkaMember(
                Consumer(
                    {
                        **self._config,
                        "group.id": group_id,
                        "auto.offset.reset": "earliest",  # a group that starts late gets what was published before
                        "enable.auto.commit": False,
                        "partition.assignment.strategy": "cooperative-sticky",
                        "session.timeout.ms": int(self.session_timeout * 1000),
                        "heartbeat.interval.ms": int(self.session_timeout * 250),
                    }
                ),
                topics={self._names(group, topic)[number]: topic for topic in topics},
                retry_topic=lambda topic: self._names(group, topic)[1],
                dead_topic=lambda topic: self._names(group, topic)[2],
                produce=self._produce,
                trimmed=lambda topic, lost: self._report(topic, group, lost),
                handler=handler,
                stop=stop,
                ordered=self.ordered,
                slots=slots,
                policy=policy,
                time_limit=time_limit,
            )
            running.append(asyncio.create_task(member.run()))
        try:
            await asyncio.gather(*running)
        finally:  # one failed, or we were cancelled: neither goes on alone
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def quarantined(self, group: str, limit: int = 100) -> list[Quarantined]:
        messages = await self._ask(self._dead, group)
        replayed = {text(headers_of(each).get("replayed")) for each in messages}
        entries = [_shown(each) for each in messages if "replayed" not in headers_of(each)]
        return sorted((each for each in entries if each.id not in replayed), key=lambda each: each.at)[:limit]

    async def replay_quarantined(self, group: str, ids: Sequence[str]) -> int:
        wanted, done = set(ids), 0
        waiting = {each.id for each in await self.quarantined(group, 1_000_000)}
        for message in await self._ask(self._dead, group):
            shown = _shown(message)
            if shown.id in wanted & waiting and "replayed" not in headers_of(message):
                _, retry, dead = self._names(group, shown.topic)
                # The group's own retry topic: the event's topic would give it to every other group as well.
                await self._produce(retry, message.key(), message.value(), {"topic": shown.topic})
                await self._produce(dead, message.key(), b"", {"replayed": shown.id})
                done += 1
        return done

    async def lag(self, group: str) -> int:
        return await self._ask(self._lag, group)

    async def close(self) -> None:
        self._closed.set()
        if self._producer is not None:
            await asyncio.to_thread(self._producer.flush, self.confirm_within)

    def _report(self, topic: str, group: str, lost: int) -> None:
        self.trimmed += lost
        report_trimmed(topic, group, lost)

    # producing

    async def _send(self, event: Event, body: bytes | Exception) -> Exception | None:
        if isinstance(body, Exception):
            return body
        try:
            await self._produce(self._topic(topic_of(event)), event.subject, body, {"topic": topic_of(event)})
        except BrokerUnavailable as error:
            return error
        return None

    async def _produce(self, topic: str, key: Any, value: bytes, headers: dict[str, Any]) -> None:
        """Returns once every in-sync replica has it."""
        loop = asyncio.get_running_loop()
        confirmed: asyncio.Future[None] = loop.create_future()

        def settle(error: KafkaError | None) -> None:
            if confirmed.done():
                return
            if error is None:
                confirmed.set_result(None)
            else:
                if error.fatal():  # this producer is dead; the next event gets a new one
                    self._producer = None
                confirmed.set_exception(self._unconfirmed(error))

        def report(error: KafkaError | None, _: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone, nobody waits
                loop.call_soon_threadsafe(settle, error)

        pairs: list[tuple[str, str | bytes | None]] = [(name, str(each)) for name, each in headers.items()]
        while True:
            try:
                self._ready().produce(topic, value, key, headers=pairs, on_delivery=report)
                break
            except BufferError:  # the local queue is full: let it drain
                await asyncio.sleep(0.05)
            except KafkaException as error:
                raise self._unconfirmed(error) from error
        await confirmed

    def _ready(self) -> Producer:
        if self._producer is None:
            self._producer = producer = Producer(
                {
                    **self._config,
                    "enable.idempotence": True,
                    "linger.ms": 2,
                    "delivery.timeout.ms": int(self.confirm_within * 1000),
                }
            )

            def poll() -> None:  # delivery reports are handed out by poll alone
                while not self._closed.is_set() and (self._producer is producer or len(producer)):
                    producer.poll(0.1)

            threading.Thread(target=poll, name="kafka-delivery-reports", daemon=True).start()
        return self._producer

    async def _ensure(self, names: Iterable[str]) -> None:
        if missing := set(names) - self._known:
            await asyncio.to_thread(self._create, missing)
            self._known |= missing

    def _create(self, names: set[str]) -> None:
        admin = AdminClient(self._config)
        if not self.create_topics:  # asking for its metadata makes the broker create a topic
            for name in names:
                admin.list_topics(name, timeout=self.confirm_within)
            return
        wanted = [NewTopic(name, self.partitions, self.replication) for name in names]
        for future in admin.create_topics(wanted, request_timeout=self.confirm_within).values():
            try:
                future.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    # looking

    async def _ask(self, work: Callable[[str], T], group: str) -> T:
        """Coordinators and leaders move, and requests fail until every broker knows: ask again within that time."""
        deadline = time.monotonic() + self.confirm_within
        while True:
            try:
                return await asyncio.to_thread(work, group)
            except KafkaException as error:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(f"Kafka did not answer: {error}") from error
            await asyncio.sleep(0.1)

    def _dead(self, group: str) -> list[Any]:
        consumer = Consumer(
            {
                **self._config,
                "group.id": f"{self.prefix}.look.{uuid4().hex}",  # never joined, never committed
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        try:
            places = self._places(consumer, f".{group}.dead")
            consumer.assign(places)
            messages, unread = [], {(place.topic, place.partition) for place in places}
            deadline = time.monotonic() + 3 * self.confirm_within
            while unread:
                message: Any = consumer.poll(0.2)
                if message is not None and message.error() is None:
                    messages.append(message)
                elif message is not None and message.error().code() == KafkaError._PARTITION_EOF:
                    unread.discard((message.topic(), message.partition()))
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(f"Kafka did not show all of the quarantine of {group} in time")
            return messages
        finally:
            consumer.close()

    def _lag(self, group: str) -> int:
        total, topics = 0, set[str]()
        for group_id in reversed(self._groups(group)):
            consumer = Consumer({**self._config, "group.id": group_id, "enable.auto.commit": False})
            try:
                places = [place for topic in topics for place in self._places(consumer, topic, exact=True)]
                if not topics:  # the retry topics name the others
                    places = self._places(consumer, f".{group}.retry")
                    topics = {place.topic.removesuffix(f".{group}.retry") for place in places}
                for place in consumer.committed(places, timeout=self.confirm_within):
                    low, high = consumer.get_watermark_offsets(place, timeout=self.confirm_within)
                    total += high - max(low, place.offset)  # a negative offset means: never committed
            finally:
                consumer.close()
        return total

    def _places(self, consumer: Consumer, ending: str, *, exact: bool = False) -> list[Any]:
        return [
            TopicPartition(name, number, OFFSET_BEGINNING)
            for name, topic in consumer.list_topics(timeout=self.confirm_within).topics.items()
            if (name == ending if exact else name.startswith(f"{self.prefix}.") and name.endswith(ending))
            for number in topic.partitions
        ]

    def _topic(self, topic: str) -> str:
        return f"{self.prefix}.{topic}"

    def _names(self, group: str, topic: str) -> tuple[str, str, str]:
        name = self._topic(topic)
        return name, f"{name}.{group}.retry", f"{name}.{group}.dead"

    def _groups(self, group: str) -> tuple[str, str]:
        """Kafka's groups for events and for retries. In one group, a member could be given the retries alone: the
        assignor counts partitions, whatever their topic."""
        return f"{self.prefix}.{group}", f"{self.prefix}.{group}.retry"

    def _unconfirmed(self, error: object) -> BrokerUnavailable:
        return BrokerUnavailable(f"Kafka did not confirm ({error}); publish the same id again")


def _shown(message: Any) -> Quarantined:
    headers = headers_of(message)
    return Quarantined(
        f"{message.topic()}/{message.partition()}/{message.offset()}",
        topic=text(headers.get("topic")),
        body=text(message.value()),
        reason=text(headers.get("reason")),
        deliveries=int(headers.get("deliveries", 0)),
        at=datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC),
    )

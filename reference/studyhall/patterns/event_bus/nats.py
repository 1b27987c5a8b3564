"""Event bus on NATS JetStream: durable pull consumers, message-id dedup, delayed redelivery.

Promise, beyond `event_bus`: a second publish of an id within `dedup_window` is dropped by the server; an
acknowledgement counts once the server confirmed it; deliveries and waits are counted by the server, so a crash
counts and waiting that is nobody's fault does not, whichever member the event comes back to.
`ordered=True` keeps order per subject: the server hands out one event per partition at a time, whichever member
asks, also through crashes and retries.

When it does NOT hold
- JetStream syncs to disk every two minutes by default: a killed server loses nothing it confirmed, a power cut
  may. Set `sync_interval: always` on the server or three replicas if that matters.
- `max_deliver` is not used: the server would stop delivering without telling anyone. The count is checked here.
- `ordered=True` costs a round trip per event and partition; a failing event holds up its whole partition.
- An event in transit when its connection breaks comes back after `ack_wait` with one attempt less: nobody answered
  for it.
- Late groups get what is younger than `retain`.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import quote, unquote

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import APIError, NotFoundError

from ..core.event import BrokerUnavailable, Event, Handler, topic_of
from ..core.job import Decision, RetryPolicy
from .bus import EVENTS, Capabilities, Quarantined
from .delivery import checked_name, encoded, judge, log, partition_of, pauses, text, wire_id

__all__ = ["NatsBus"]

DAY = 24 * 3600.0
# Never 0: nats-py then spins on a refused port, and nothing else in the process runs (not even a time limit).
RECONNECT = 0.2
# Seconds between signs of life. The third without an answer ends the connection: after 360 s with nats-py's default.
PING = 3
UNANSWERED = 1_000  # events whose answer NATS has not taken, before they block others
SOON = 1.0  # seconds an answer may block; then it goes on in the background
FETCH = 0.5  # seconds a fetch waits; also how long an idle consumer needs to notice `stop`
TROUBLE = (NatsError, OSError, TimeoutError)


class NatsBus:
    def __init__(
        self,
        url: str,
        *,
        prefix: str = "events",
        ordered: bool = False,
        partitions: int = 8,
        ack_wait: float = 30.0,
        dedup_window: float = 120.0,
        retain: float = 7 * DAY,
        replicas: int = 1,
        confirm_within: float = 5.0,
    ) -> None:
        self.url, self.prefix = url, checked_name(prefix)
        self.ordered, self.partitions = ordered, partitions if ordered else 1
        self.ack_wait, self.retain, self.replicas = ack_wait, retain, replicas
        self.confirm_within = confirm_within
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._declared = False
        self._running: dict[tuple[str, int], int] = {}  # group, sequence → redeliveries that consumed no attempt
        self.capabilities = Capabilities(
            broker="nats-jetstream",
            ordered_per_key=ordered,
            poison_delays="its partition" if ordered else "itself",
            dedup_window=dedup_window,
            limits=(
                "no transactions between publish and acknowledge",
                "power loss may take back what was not synced (every two minutes unless configured)",
                "late groups get what is younger than `retain`",
                "what somebody purges is gone without a word: the server keeps no trace of it",
            ),
        )

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        try:
            stream = await self._jetstream()
        except TROUBLE as error:
            return [self._unconfirmed(error)] * len(events)
        return list(await asyncio.gather(*(self._send(stream, event) for event in events)))

    async def subscribe(self, group: str, topics: Sequence[str]) -> None:
        await self._declare(group, topics)

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
        unanswered: set[asyncio.Task[None]] = set()

        async def work(durable: str) -> None:
            async for _ in pauses(stop):
                try:
                    await self._declare(group, topics)
                    stream = await self._jetstream()
                    source = await stream.pull_subscribe_bind(consumer=durable, stream=self.prefix)
                    while not stop.is_set():
                        # One at a time per worker: nats-py's fetch(n) holds back the first event until n are
                        # there or the timeout is over, and a fetched event that waits here is ageing.
                        with contextlib.suppress(TimeoutError):
                            (message,) = await source.fetch(1, timeout=FETCH)
                            await self._settle(group, message, handler, policy, time_limit, stop, unanswered)
                except Exception as error:  # of one event; its message comes back after `ack_wait`
                    self._declared = False
                    log.warning("group %s cannot read from NATS, trying again: %r", group, error)

        # Ordered: the server gives out one per durable anyway; more workers would only wait.
        durables = self._durables(group) if self.ordered else [group] * concurrency
        try:
            await asyncio.gather(*map(work, durables))
            await asyncio.gather(*unanswered, return_exceptions=True)
        finally:
            for answer in unanswered:
                answer.cancel()

    async def quarantined(self, group: str, limit: int = 100) -> list[Quarantined]:
        stream, entries, sequence = await self._jetstream(), list[Quarantined](), 0
        with contextlib.suppress(NotFoundError):
            while len(entries) < limit:
                subject = f"{self.prefix}.quarantine.{group}.*"
                kept = await stream.get_msg(self._parking, seq=sequence + 1, subject=subject, next=True)
                sequence = kept.seq or 0
                head = kept.headers or {}
                at = kept.time if isinstance(kept.time, datetime) else datetime.now(UTC)
                entries.append(
                    Quarantined(
                        str(sequence),
                        topic=(kept.subject or "").rsplit(".", 1)[-1],
                        body=text(kept.data),
                        reason=unquote(head.get("Reason", "")),
                        deliveries=int(head.get("Deliveries", 0)),
                        at=at,
                    )
                )
        return entries

    async def replay_quarantined(self, group: str, ids: Sequence[str]) -> int:
        stream, done = await self._jetstream(), 0
        for each in ids:
            if not (each.isascii() and each.isdigit() and 0 < int(each) < 2**63):
                continue
            with contextlib.suppress(NotFoundError):
                kept = await stream.get_msg(self._parking, seq=int(each))
                prefix, _, topic = (kept.subject or "").rpartition(".")
                if prefix != f"{self.prefix}.quarantine.{group}":
                    continue
                # A subject only this group's consumers listen to: the topic's own would reach every group.
                await stream.publish(
                    f"{self.prefix}.replay.{group}.{topic}",
                    kept.data or b"",
                    timeout=self.confirm_within,
                    headers={"Nats-Msg-Id": f"replay/{group}/{each}"},
                )
                try:
                    await stream.delete_msg(self._parking, int(each))
                    done += 1
                except APIError as error:
                    # Gone: somebody else replayed it just now, and the server drops ours.
                    if error.err_code != 10057:
                        raise
        return done

    async def lag(self, group: str) -> int:
        stream, total = await self._jetstream(), 0
        for durable in self._durables(group):
            with contextlib.suppress(NotFoundError):
                info = await stream.consumer_info(self.prefix, durable)
                total += (info.num_pending or 0) + (info.num_ack_pending or 0)
        return total

    async def close(self) -> None:
        if self._client is not None and not self._client.is_closed:
            await self._client.close()

    # one event

    async def _settle(
        self,
        group: str,
        message: Msg,
        handler: Handler,
        policy: RetryPolicy,
        time_limit: float,
        stop: asyncio.Event,
        unanswered: set[asyncio.Task[None]],
    ) -> None:
        spot = (group, message.metadata.sequence.stream)
        if spot in self._running:  # cut off for longer than `ack_wait`: our own handler of it still runs
            self._running[spot] += 1
            return None
        self._running[spot] = 0  # before anything is awaited: another worker may be given it as well
        renewal = asyncio.create_task(self._renew(message))
        answer: asyncio.Task[None] | None = None

        def over(_: object = None) -> None:
            renewal.cancel()
            del self._running[spot]

        try:
            if (delivered := message.metadata.num_delivered) > 1:
                before = await self._waits(spot)
                self._running[spot] += before
            deliveries = max(1, delivered - self._running[spot])
            verdict = await judge(handler, message.data, deliveries, policy, time_limit)
            answering = self._answer_through_outages(spot, message, verdict, deliveries, stop)
            if verdict is None or len(unanswered) >= UNANSWERED:
                return await answering
            # A full server takes no copy into the quarantine; events waiting for that must not fill every place.
            answer = asyncio.create_task(answering)
            unanswered.add(answer)
            answer.add_done_callback(unanswered.discard)
            answer.add_done_callback(over)
            await asyncio.wait([answer], timeout=SOON)
        finally:
            if answer is None:
                over()

    async def _answer_through_outages(
        self, spot: tuple[str, int], message: Msg, verdict: Decision | None, deliveries: int, stop: asyncio.Event
    ) -> None:
        """An answer that is dropped would count as a crash."""
        async for _ in pauses(asyncio.Event()):
            try:
                return await self._answer(spot, message, verdict, deliveries)
            except TROUBLE:
                if stop.is_set():
                    raise
        return None

    async def _answer(self, spot: tuple[str, int], message: Msg, verdict: Decision | None, deliveries: int) -> None:
        group, waits = spot[0], self._running[spot]
        if verdict is not None and verdict.delay is not None:
            # Before the event goes back: killed in between, it has one attempt more, never one less.
            if waits := waits + (not verdict.consume_attempt):
                stream = await self._jetstream()
                await stream.publish(self._counter(spot), str(waits).encode(), timeout=self.confirm_within)
            await message.nak(verdict.delay)
            return
        if verdict is not None:
            await self._park(group, message, verdict.reason, deliveries)
            log.warning("quarantined an event for %s: %s", group, verdict.reason)
        await message.ack_sync(self.confirm_within)
        if waits:
            stream = await self._jetstream()
            await stream.purge_stream(self._waiting, subject=self._counter(spot))

    async def _waits(self, spot: tuple[str, int]) -> int:
        """A redelivery always counts on the server; those that consumed no attempt are counted here."""
        stream = await self._jetstream()
        try:
            return int((await stream.get_last_msg(self._waiting, self._counter(spot))).data or b"0")
        except NotFoundError:
            return 0

    async def _renew(self, message: Msg) -> None:
        while True:
            await asyncio.sleep(self.ack_wait / 3)
            with contextlib.suppress(*TROUBLE):
                await message.in_progress()

    async def _park(self, group: str, message: Msg, reason: str, deliveries: int) -> None:
        topic = message.subject.split(".")[3 if message.subject.split(".")[1] == "replay" else 2]
        stream = await self._jetstream()
        await stream.publish(
            f"{self.prefix}.quarantine.{group}.{topic}",
            message.data,
            timeout=self.confirm_within,
            headers={
                "Nats-Msg-Id": f"{group}/{message.metadata.sequence.stream}",  # once, also after a crash here
                "Reason": quote(reason),  # a line break would end the header
                "Deliveries": str(deliveries),
            },
        )

    async def _send(self, stream: JetStreamContext, event: Event) -> Exception | None:
        body = encoded(event)
        if isinstance(body, Exception):
            return body
        partition = partition_of(event.subject, self.partitions)
        try:
            await stream.publish(
                f"{self.prefix}.event.{topic_of(event)}.{partition}",
                body,
                timeout=self.confirm_within,
                headers={"Nats-Msg-Id": wire_id(event)},
            )
        except TROUBLE as error:
            return self._unconfirmed(error)
        return None

    # topology

    async def _declare(self, group: str, topics: Sequence[str]) -> None:
        stream = await self._jetstream()
        replays = [f"{self.prefix}.replay.{checked_name(group)}.{checked_name(topic)}" for topic in topics]
        if not self.ordered:
            subjects = [f"{self.prefix}.event.{topic}.*" for topic in topics]
            await self._durable(stream, group, [*subjects, *replays])
            return
        for number, durable in enumerate(self._durables(group)[:-1]):
            subjects = [f"{self.prefix}.event.{topic}.{number}" for topic in topics]
            await self._durable(stream, durable, subjects)
        await self._durable(stream, self._durables(group)[-1], replays)

    async def _durable(self, stream: JetStreamContext, name: str, subjects: list[str]) -> None:
        config = ConsumerConfig(
            durable_name=name,
            filter_subjects=subjects,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait,
            max_deliver=-1,
            # Events in backoff count as pending: a small number lets poison stop the whole group.
            max_ack_pending=1 if self.ordered else 10_000,
        )
        await stream.add_consumer(self.prefix, config)

    def _durables(self, group: str) -> list[str]:
        if not self.ordered:
            return [group]
        return [*(f"{group}={number}" for number in range(self.partitions)), f"{group}=replay"]

    @property
    def _parking(self) -> str:
        return f"{self.prefix}-quarantine"

    @property
    def _waiting(self) -> str:
        return f"{self.prefix}-waits"

    def _counter(self, spot: tuple[str, int]) -> str:
        return f"{self.prefix}.waits.{spot[0]}.{spot[1]}"

    async def _jetstream(self) -> JetStreamContext:
        async with self._connecting:
            if self._client is None or self._client.is_closed:
                self._client = await nats.connect(
                    self.url,
                    # -1 here also means that the first connection is awaited forever: publish would not answer.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=RECONNECT,
                    connect_timeout=5,
                    ping_interval=PING,
                    max_outstanding_pings=2,
                    error_cb=_quiet,
                )
                self._client.options["max_reconnect_attempts"] = -1  # from now on it reconnects, however late
            stream = self._client.jetstream(timeout=self.confirm_within)
            if not self._declared:  # at first, and after trouble: a server that lost its data has no streams
                await self._streams(stream)
                self._declared = True
        return stream

    async def _streams(self, stream: JetStreamContext) -> None:
        kinds = {self.prefix: ("event", "replay"), self._parking: ("quarantine",), self._waiting: ("waits",)}
        for name, words in kinds.items():
            config = StreamConfig(
                name=name,
                subjects=[f"{self.prefix}.{word}.>" for word in words],
                retention=RetentionPolicy.LIMITS,
                max_age=0 if name == self._parking else self.retain,
                max_msgs_per_subject=1 if name == self._waiting else -1,
                duplicate_window=self.capabilities.dedup_window,
                num_replicas=self.replicas,
            )
            try:
                await stream.add_stream(config)
            except APIError as error:
                if error.err_code != 10058:  # it exists with other settings: an operator's business
                    raise

    def _unconfirmed(self, error: BaseException) -> BrokerUnavailable:
        self._declared = False
        return BrokerUnavailable(f"NATS did not confirm ({error!r}); publish the same id again")


async def _quiet(error: Exception) -> None:
    log.debug("NATS client: %r", error)

"""Event bus on Redis Streams, with its own consumer (`stream_consumer`).

Promise, beyond `event_bus`: a group starts at the beginning of the stream and survives BUSYGROUP,
NOGROUP and lost replies; events that a dead member held are taken over after `claim_idle` seconds, while a
live one keeps them however slow its handler is; deliveries are counted by Redis, so a crash counts; one id is
published once per `dedup_window`; trimming never drops what a group has not finished, and what somebody else trims
away unread is reported (logged as an error, with the count). `ordered=True` keeps
order per subject: each partition of a topic has one owner at a time, inside it subjects run side by side.

When it does NOT hold
- Redis keeps what its persistence keeps: with AOF everysec a killed server loses nothing it confirmed, a
  power cut up to a second, a failover whatever was not replicated. The outbox can publish that range again.
- `ordered=True` and an owner frozen for longer than its lease: an event may overlap with the next of its key.
- A group nobody consumes any more holds back trimming forever: `XGROUP DESTROY` it when it is retired.
- One primary (standalone or Sentinel), not Cluster. Use the same `partitions` in every process.
"""

import asyncio
import itertools
import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from ..core.event import BrokerUnavailable, Event, Handler, topic_of
from ..core.job import RetryPolicy
from .bus import EVENTS, Capabilities, Quarantined
from .delivery import checked_name, encoded, partition_of, report_trimmed, text, wire_id
from .stream_consumer import StreamConsumer
from .stream_scripts import GAP, PUBLISH, REPLAY, SUBSCRIBE, TRIM, raw

__all__ = ["RedisStreamsBus"]

DAY = 24 * 3600.0
# The id of a quarantined entry: topic/entry.
_ENTRY = re.compile(r"([\w-]+)/(\d{1,18}-\d{1,18})", re.ASCII)


class RedisStreamsBus:
    """`redis`: a pooled client, `connections.producer_client(url)`; blocking reads stay below its timeout."""

    def __init__(
        self,
        redis: Redis,
        *,
        prefix: str = "events",
        member: str | None = None,
        ordered: bool = False,
        partitions: int = 1,
        claim_idle: float = 30.0,
        dedup_window: float = 120.0,
        retain: float = 7 * DAY,
    ) -> None:
        self.redis = redis
        self.prefix = prefix
        # Unique by default: two processes with one name would both be given that name's pending entries. A
        # name that outlives the process (a StatefulSet's pod) gets its entries at once, not after claim_idle.
        self.member = member or f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:6]}"
        self.ordered, self.partitions = ordered, partitions
        self.claim_idle, self.retain = claim_idle, retain
        self._members = itertools.count()
        self.trimmed = 0  # events that somebody else's XTRIM took from a group of this process: alert on it
        self.capabilities = Capabilities(
            broker="redis-streams",
            ordered_per_key=ordered,
            poison_delays="its key" if ordered else "itself",
            dedup_window=dedup_window,
            limits=(
                "no broker-side transactions between publish and acknowledge",
                "power loss may take back the last second (AOF everysec), a failover what was not replicated",
                "late groups get what is younger than `retain` or still held back by a slower group",
                "5,000 events in backoff (ordered: also those behind them) make a member stop reading",
            ),
        )

    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        results: list[Exception | None] = [None] * len(events)
        batches: dict[str, list[int]] = {}
        bodies: dict[int, bytes] = {}
        for index, event in enumerate(events):
            body = encoded(event)
            if isinstance(body, Exception):
                results[index] = body
                continue
            bodies[index] = body
            batches.setdefault(self._partition(event), []).append(index)
        for stream, indexes in batches.items():
            parts = [p for i in indexes for p in (wire_id(events[i]), bodies[i], events[i].subject)]
            try:
                await PUBLISH(self.redis, [stream], [int(self.capabilities.dedup_window * 1000), *parts])
            except (RedisError, OSError) as error:
                for i in indexes:
                    results[i] = BrokerUnavailable(f"Redis did not confirm ({error!r}); publish the same id again")
        return results

    async def subscribe(self, group: str, topics: Sequence[str]) -> None:
        await self.redis.sadd(f"{self.prefix}:topics:{checked_name(group)}", *map(checked_name, topics))
        for stream in self._streams(group, topics):
            await SUBSCRIBE(self.redis, [stream], [group])

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
        async def tidy() -> None:
            for stream in self._streams(group, topics):
                await self._notice_gap(stream, group)
            for topic in topics:
                await self.trim(topic)

        # Each call is a member of its own: two in one process must not share a list of pending entries.
        number = next(self._members)
        consumer = StreamConsumer(
            self.redis,
            streams=self._streams(group, topics),
            group=group,
            member=f"{self.member}-{number}" if number else self.member,
            handler=handler,
            subscribe=lambda: self.subscribe(group, topics),
            tidy=tidy,
            quarantine=lambda stream: f"{self._topic(stream)}:quarantine:{group}",
            trimmed=lambda stream, lost: self._report(stream, group, lost),
            stop=stop,
            ordered=self.ordered,
            concurrency=concurrency,
            policy=policy,
            time_limit=time_limit,
            claim_idle=self.claim_idle,
        )
        await consumer.run()

    async def trim(self, topic: str) -> int:
        """Drop what every group has finished and is older than `retain`. Runs by itself in `consume`."""
        dropped = 0
        for stream in self._partitions(topic):
            with suppress(ResponseError):  # no such stream yet
                dropped += int(await TRIM(self.redis, [stream], [int(self.retain * 1000)]))
        return dropped

    async def quarantined(self, group: str, limit: int = 100) -> list[Quarantined]:
        entries = []
        for topic in await self._topics(group):
            key = f"{self.prefix}:{topic}:quarantine:{group}"
            for entry, flat in await raw(self.redis, "XRANGE", key, "-", "+", "COUNT", limit) or []:
                field = {text(name): text(value) for name, value in flat.items()}
                at = datetime.fromtimestamp(int(text(entry).partition("-")[0]) / 1000, UTC)
                deliveries = int(field["deliveries"])
                entries.append(
                    Quarantined(f"{topic}/{text(entry)}", topic, field["event"], field["reason"], deliveries, at)
                )
        return sorted(entries, key=lambda each: each.at)[:limit]

    async def replay_quarantined(self, group: str, ids: Sequence[str]) -> int:
        done = 0
        for each in ids:
            if (match := _ENTRY.fullmatch(each)) is None:
                continue
            topic, entry = match.groups()
            base = f"{self.prefix}:{topic}"
            # Into the group's own stream: the topic's stream would give it to every other group as well.
            done += int(await REPLAY(self.redis, [f"{base}:quarantine:{group}", f"{base}:replay:{group}"], [entry]))
        return done

    async def lag(self, group: str) -> int:
        total = 0
        for stream in self._streams(group, await self._topics(group)):
            with suppress(ResponseError):
                await self._notice_gap(stream, group)
                for info in await self.redis.xinfo_groups(stream):
                    if text(info["name"]) == group:
                        total += int(info["pending"]) + await self._unread(stream, info)
        return total

    async def close(self) -> None:
        """The client belongs to the caller."""

    async def _notice_gap(self, stream: str, group: str) -> None:
        if lost := int(await GAP(self.redis, [stream], [group])):
            self._report(stream, group, lost)

    def _report(self, stream: str, group: str, lost: int) -> None:
        self.trimmed += lost
        report_trimmed(stream, group, lost)

    async def _unread(self, stream: str, info: dict[str, object]) -> int:
        if isinstance(unread := info.get("lag"), int):
            return unread
        start = text(info["last-delivered-id"])  # type: ignore[arg-type]  # Redis lost count: look
        return len(await self.redis.xrange(stream, f"({start}", "+") or [])

    async def _topics(self, group: str) -> list[str]:
        return sorted(text(each) for each in await self.redis.smembers(f"{self.prefix}:topics:{group}"))

    def _streams(self, group: str, topics: Iterable[str]) -> list[str]:
        replays = [f"{self.prefix}:{topic}:replay:{group}" for topic in topics]
        return [*(s for topic in topics for s in self._partitions(topic)), *replays]

    def _partitions(self, topic: str) -> list[str]:
        return [f"{self.prefix}:{topic}:{number}" for number in range(self.partitions)]

    def _partition(self, event: Event) -> str:
        return f"{self.prefix}:{topic_of(event)}:{partition_of(event.subject, self.partitions)}"

    def _topic(self, stream: str) -> str:
        return ":".join(stream.split(":")[: self.prefix.count(":") + 2])

"""One member of a Redis Streams consumer group: reads, runs, acknowledges, takes over from the dead.

Promise: what Redis gave this member is run and acknowledged after success (acks travel in batches), or stays
pending where another member finds it. Lost replies are found: own pending entries come first after
every connect. A handler that outlasts `claim_idle` is not duplicated: a live member renews what it holds.

When it does NOT hold: a process frozen for longer than `claim_idle` loses what it held to another member and,
once awake, finishes the handler it was in: that event runs twice (inbox).
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from ..core.event import Handler
from ..core.job import RetryPolicy
from .delivery import Lanes, judge, log, pauses, set_within, text
from .stream_scripts import AGAIN, FORGET, HOLD, LEASE, QUARANTINE, RELEASE, TAKE, Script, raw

__all__ = ["StreamConsumer"]

LONGEST_BLOCK = 0.5  # also how long an idle consumer needs to notice `stop`
LINGER = 0.002  # acks of this many seconds share a round trip
MAX_HELD = 5_000  # events in memory, most of them in backoff, before reading pauses
Spot = tuple[str, str]  # stream, entry id


@dataclass
class StreamConsumer:
    redis: Redis
    streams: Sequence[str]
    group: str
    member: str
    handler: Handler
    subscribe: Callable[[], Awaitable[None]]
    tidy: Callable[[], Awaitable[None]]
    quarantine: Callable[[str], str]
    trimmed: Callable[[str, int], None]
    stop: asyncio.Event
    ordered: bool
    concurrency: int
    policy: RetryPolicy
    time_limit: float
    claim_idle: float
    _held: set[Spot] = field(default_factory=set)
    _waiting: int = 0  # of those held, in backoff
    _acks: list[Spot] = field(default_factory=list)
    _owned: set[str] = field(default_factory=set)
    _owned_until: float = 0.0
    _lanes: Lanes = field(default_factory=Lanes)

    async def run(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)
        self._news, self._freed = asyncio.Event(), asyncio.Event()
        self._leased = asyncio.Event()
        acking, tending = asyncio.create_task(self._ack()), asyncio.create_task(self._tend())
        try:
            await self._read()
            await self._lanes.drain()  # renewal goes on meanwhile: a stopping member must not lose its work
        finally:
            await _end(tending)
            await self._lanes.abort()
            await _end(acking)
            await self._leave()

    # reading

    async def _read(self) -> None:
        async for _ in pauses(self.stop):
            try:
                # A full Redis takes no new group, but an existing one can be read.
                with contextlib.suppress(OutOfMemoryError):
                    await self.subscribe()  # also after NOGROUP: data loss must not end the consumer
                # What somebody removed while nobody read shows only until the next entry is read (Valkey 9).
                with contextlib.suppress(ResponseError):
                    await self.tidy()
                await self._own_pending()
                while not self.stop.is_set():
                    await self._read_new()
            except (RedisError, OSError) as error:
                log.warning("group %s cannot read from Redis, trying again: %r", self.group, error)

    async def _own_pending(self) -> None:
        """Entries given to this name whose reply never arrived: lost connection, or an earlier process."""
        for stream in self.streams:
            if not self.ordered:
                await self._missed(stream)
            elif stream in self._owned:  # its lease took over everything pending; only replies can be missing
                await self._take(stream, idle=0)

    async def _missed(self, stream: str) -> None:
        start = "-"
        while pending := await self.redis.xpending_range(stream, self.group, start, "+", 500, self.member):
            ids = [text(known["message_id"]) for known in pending]  # type: ignore[arg-type]
            for entry in ids:
                self._start(stream, entry, {})
            start = f"({ids[-1]}"

    async def _read_new(self) -> None:
        # Unordered: no more than can run now, the rest is for others. Ordered: the stream is ours alone, and what
        # queues up behind a failing key must not block the other keys.
        ready = len(self._held) - self._waiting - len(self._acks)
        room = min(MAX_HELD - len(self._held), 500 if self.ordered else self.concurrency - ready)
        if room <= 0:
            self._freed.clear()
            await _either(self._freed, self.stop, LONGEST_BLOCK)
            return
        streams = self._readable()
        if not streams:
            self._leased.clear()
            await _either(self._leased, self.stop, LONGEST_BLOCK)
            return
        # Never cancelled: entries of a reply nobody reads are ours and run only after the next reconnect.
        block = int(min(LONGEST_BLOCK, self._socket_timeout() / 2) * 1000)
        head = ("XREADGROUP", "GROUP", self.group, self.member, "COUNT", room, "BLOCK", block, "STREAMS")
        reply = await raw(self.redis, *head, *streams, *(">" for _ in streams))
        for stream, entries in _by_stream(reply):
            for entry, flat in entries:
                self._start(text(stream), text(entry), flat, new=True)

    async def _take(self, stream: str, *, idle: float) -> None:
        cursor = "0-0"
        while True:
            args = [self.group, self.member, int(idle * 1000), cursor, 2 * self.concurrency]
            cursor, entries, trimmed = await TAKE(self.redis, [stream], args)
            if trimmed:
                self.trimmed(stream, len(trimmed))
            for entry, flat in entries:
                self._start(stream, text(entry), _fields(flat))
            if (cursor := text(cursor)) == "0-0" or (entries and not self.ordered):  # leave some for others
                return

    # running

    def _start(self, stream: str, entry: str, fields: Mapping[bytes, bytes], *, new: bool = False) -> None:
        if (stream, entry) in self._held:
            return
        self._held.add((stream, entry))

        async def work() -> None:
            done = False
            try:
                done = await self._work(stream, entry, fields, new)
            finally:
                if done:  # held until Redis knows: looking for lost replies must not find it again
                    self._acks.append((stream, entry))
                    self._news.set()
                else:
                    self._let_go((stream, entry))

        self._lanes.start(f"{stream} {text(fields.get(b'key'))}" if self.ordered else None, work)

    async def _work(self, stream: str, entry: str, fields: Mapping[bytes, bytes], new: bool) -> bool:
        """True: done, acknowledge it. False: it is settled otherwise, or somebody else's now."""
        deliveries, counts = 1, True
        while True:
            async with self._slots:
                if self.ordered and not self._owns(stream):
                    return False  # the next owner takes it over, in order
                if self.stop.is_set():
                    await self._release(stream, entry, 0)
                    return False
                if not new:
                    again = await self._until_answered(AGAIN, [stream], [self.group, self.member, entry, int(counts)])
                    if again == []:
                        self.trimmed(stream, 1)
                    if not again:
                        return False  # another member took it while we were frozen or cut off
                    deliveries, fields = int(again[0]), _fields(again[1])
                body = fields.get(b"event", b"")
                verdict = await judge(self.handler, body, deliveries, self.policy, self.time_limit)
            if verdict is None:
                return True
            if verdict.delay is None:
                facts = [body, fields.get(b"key", b""), verdict.reason, deliveries]
                await self._until_answered(QUARANTINE, [stream, self.quarantine(stream)], [self.group, entry, *facts])
                log.warning("quarantined %s of %s for %s: %s", entry, stream, self.group, verdict.reason)
                return False
            if await self._stopped_while_waiting(stream, entry, verdict.delay):
                return False
            new, counts = False, verdict.consume_attempt

    async def _stopped_while_waiting(self, stream: str, entry: str, delay: float) -> bool:
        due = time.monotonic() + delay
        self._waiting += 1
        self._freed.set()
        try:
            if not await set_within(self.stop, delay):
                return False
        finally:
            self._waiting -= 1
        await self._release(stream, entry, due - time.monotonic())
        return True

    def _let_go(self, spot: Spot) -> None:
        self._held.discard(spot)
        self._freed.set()

    async def _release(self, stream: str, entry: str, due: float) -> None:
        """Any other member may claim it once its backoff is over."""
        idle = max(0, int((self.claim_idle - max(due, 0.0)) * 1000))
        with contextlib.suppress(RedisError, OSError):
            await HOLD(self.redis, [stream], [self.group, self.member, idle, entry])

    async def _until_answered(self, script: Script, keys: list[str], args: list[Any]) -> Any:
        """Through outages; a repeat costs at most one delivery more. Gives up only when stopping."""
        async for _ in pauses(asyncio.Event()):
            try:
                return await script(self.redis, keys, args)
            except (RedisError, OSError) as error:
                log.warning("Redis did not answer, trying again: %r", error)
                if self.stop.is_set():
                    return None
        return None

    # acknowledging and tending

    async def _ack(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(LINGER)
            self._news.clear()
            try:
                await self._flush()
            except (RedisError, OSError) as error:
                log.warning("acknowledging again later: %r", error)
                self._news.set()
                await asyncio.sleep(0.2)

    async def _flush(self) -> None:
        done, by_stream = list(self._acks), dict[str, list[str]]()
        for stream, entry in done:
            by_stream.setdefault(stream, []).append(entry)
        if by_stream:
            async with self.redis.pipeline(transaction=False) as pipe:
                for stream, entries in by_stream.items():
                    pipe.xack(stream, self.group, *entries)
                await pipe.execute()
        del self._acks[: len(done)]
        for spot in done:
            self._let_go(spot)

    async def _tend(self) -> None:
        tidied = 0.0
        while True:
            try:
                if self.ordered:
                    await self._share_out()
                for stream in self.streams:
                    if held := [entry for each, entry in self._held if each == stream]:
                        await HOLD(self.redis, [stream], [self.group, self.member, 0, *held])
                    if not self.ordered and not self.stop.is_set():
                        await self._take(stream, idle=self.claim_idle)
                if time.monotonic() - tidied > 10:
                    await self.tidy()
                    for stream in self.streams:
                        await FORGET(self.redis, [stream], [self.group, "", 3_600_000])
                    tidied = time.monotonic()
            except (RedisError, OSError) as error:
                log.warning("group %s cannot renew what it holds: %r", self.group, error)
            await asyncio.sleep(self.claim_idle / 4)

    async def _leave(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._flush()
            for stream in self.streams:
                await RELEASE(self.redis, [self._lease(stream)], [self.member])
                await FORGET(self.redis, [stream], [self.group, self.member, 3_600_000])
            await self.redis.zrem(self._roll(), self.member)

    # order: leases on streams

    async def _share_out(self) -> None:
        asked = time.monotonic()
        keys = [self._roll(), *map(self._lease, self.streams)]
        fair, held = await LEASE(self.redis, keys, [self.member, int(self.claim_idle * 1000)])
        names = [self.streams[int(index)] for index in held]
        if not self._owns_any():
            self._owned.clear()  # we were away for longer than the lease: everything is taken over again
        self._owned &= set(names)
        self._owned_until = asked + self.claim_idle
        for stream in names[int(fair) :]:  # more than our share: stop reading, let go when nothing is held
            self._owned.discard(stream)
            if not any(each == stream for each, _ in self._held):
                await RELEASE(self.redis, [self._lease(stream)], [self.member])
        for stream in names[: int(fair)]:
            if stream not in self._owned and not self.stop.is_set():
                self._owned.add(stream)
                await self._take(stream, idle=0)  # what the last owner left comes before anything new
                self._leased.set()

    def _readable(self) -> list[str]:
        return [s for s in self.streams if not self.ordered or self._owns(s)]

    def _owns(self, stream: str) -> bool:
        return stream in self._owned and self._owns_any()

    def _owns_any(self) -> bool:
        return time.monotonic() < self._owned_until

    def _lease(self, stream: str) -> str:
        return f"{stream}:owner:{self.group}"

    def _roll(self) -> str:
        return f"{self.streams[0]}:members:{self.group}"

    def _socket_timeout(self) -> float:
        """redis-py 8 sets 5 s by default: a longer BLOCK looks like a dead server and the reply is lost."""
        return float(self.redis.connection_pool.connection_kwargs.get("socket_timeout") or 60.0)


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _by_stream(reply: Any) -> Any:
    return reply.items() if isinstance(reply, dict) else reply or []


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel it until it ends: on Python 3.11 a Redis call that ends at the same moment swallows a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)


async def _either(first: asyncio.Event, second: asyncio.Event, seconds: float) -> None:
    waits = [asyncio.create_task(each.wait()) for each in (first, second)]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()

"""The one way jobs get into a queue: named by business key, bounded, never hanging, and prepared by a list of steps.

    producer = Producer(url, validated(jobs), tracing_adds(), signing(signer), small(), Flows())
    await producer.enqueue(JobRequest("resize", {"image": 7}, key="image-7"))

Promise: `enqueue` answers within `timeout` seconds whatever state Redis is in. When it returns, the job is in
the queue, once per business key. When it raises `QueueUnavailable`, enqueue again with the same key: an add
that landed although its answer was lost is the same job, not a second one. The same key with another payload is
refused (`KeyReused`), not silently taken for a repetition.

It does not hold across the loss of Redis' data (see the outbox for work that must not depend on it), and a
key is only remembered as long as the job is retained; later repeats are stopped by the idempotency marker.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

from bullmq import Queue
from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError

from .core.connections import meaning, producer_client
from .core.failures import FailedTwin, InvalidDelay, KeyReused, QueueUnavailable
from .core.request import AddNext, AddStep, JobRef, JobRequest, Outgoing, compact, payload_of
from .job_ids import job_id
from .priority import priority_of

__all__ = ["FailedTwin", "JobRef", "JobRequest", "KeyReused", "Producer", "QueueUnavailable"]

MAX_ADDS = 16  # at once, by one producer: more would only open more connections
DAY = 24 * 3600
MAX_DELAY = 366 * DAY
# How long finished jobs stay (otherwise forever) and what of them, as in `retention.DEFAULT`.
KEPT: dict[str, Any] = {"removeOnComplete": {"count": 1_000, "age": DAY}, "removeOnFail": {"age": 14 * DAY}}
KEPT |= {"stackTraceLimit": 5, "keepLogs": 50}
AT_ONCE = 100  # jobs per call of the script: the server answers nobody else meanwhile
_KEYS = ["marker", "meta", "id", "prioritized", "delayed", "active", "events", "pc", "failed"]
# What BullMQ's addPrioritizedJob and addDelayedJob do for jobs without parent or deduplication (a test compares), for
# many jobs of a type, without reading and writing the options of each again. BullMQ silently ignores an existing id,
# even one in the failed set: so what was there is returned, its score in the failed set, its data and its time.
_ADD = b"""local marker, meta, id, prioritized, delayed, active, events, pc, failed = unpack(KEYS, 1, 9)
local name, opts, priority, delay, now = unpack(ARGV, 1, 5)
local call, found = redis.call, {}
local set = call('HMGET', meta, 'opts.maxLenEvents', 'paused', 'concurrency')
local most = set[1] or 10000
if not set[1] then call('HSET', meta, 'opts.maxLenEvents', most) end
local wake = not set[2] and not (set[3] and call('LLEN', active) >= tonumber(set[3]))
for at = 10, #KEYS do
  local key = KEYS[at]
  local job = key:sub(#marker - 5)
  local was = call('HMGET', key, 'data', 'timestamp')
  call('INCR', id)
  if was[1] or was[2] then
    call('XADD', events, 'MAXLEN', '~', most, '*', 'event', 'duplicated', 'jobId', job)
    found[at - 9] = {call('ZSCORE', failed, job), was[1], was[2]}
  else
    found[at - 9] = 0
    call('HSET', key, 'name', name, 'data', ARGV[at - 4], 'opts', opts, 'timestamp', now, 'delay', delay,
      'priority', priority)
    call('XADD', events, '*', 'event', 'added', 'jobId', job, 'name', name)
    if delay == '0' then
      call('ZADD', prioritized, priority * 0x100000000 + call('INCR', pc) % 0x100000000, job)
      if wake then call('ZADD', marker, 0, '0') end
      wake = false
      call('XADD', events, 'MAXLEN', '~', most, '*', 'event', 'waiting', 'jobId', job)
    else
      local due = now + delay
      local last = call('ZREVRANGEBYSCORE', delayed, due * 0x1000 + 0xfff, due * 0x1000, 'WITHSCORES', 'LIMIT', 0, 1)
      call('ZADD', delayed, last[2] and math.min(last[2] + 1, due * 0x1000 + 0xfff) or due * 0x1000, job)
      call('XADD', events, 'MAXLEN', '~', most, '*', 'event', 'delayed', 'jobId', job, 'delay', due)
      call('ZADD', marker, call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2] / 0x1000, '1')
    end
  end
end
return found"""
_SHA = hashlib.sha1(_ADD, usedforsecurity=False).hexdigest().encode()
WithJobs = Callable[[Sequence[Outgoing]], Awaitable[None]]


class Producer:
    """Open one per process; close it at the end.

    A step is `async def step(jobs, call_next)`: it checks or fills in the `Outgoing` jobs, then `await call_next()`.
    Without steps the payload goes as it is into the `queue` of its request. `flow.Flows()` adds those with children.
    """

    def __init__(
        self, url: str, *steps: AddStep, prefix: str = "bull", timeout: float = 1.5, retention: dict[str, Any] = KEPT
    ) -> None:
        self._steps, self._kept = steps, retention
        self._queue_of: Any = next((step.queue_of for step in steps if hasattr(step, "queue_of")), None)
        self._flows: Any = next((step for step in steps if hasattr(step, "add_flow")), None)
        self._timeout, self._turns = timeout, asyncio.Semaphore(MAX_ADDS)
        self.redis, self.prefix = producer_client(url, answer=timeout), prefix
        self.admission: WithJobs | None = None  # set it: asked before every add, raises `Overloaded` to refuse
        self._queues: dict[str, Queue] = {}
        self._idle: list[Any] = []  # connections of the pool; at most MAX_ADDS
        # By queue, job name and number: options, and what commands that add such jobs share.
        self._shared: dict[tuple[str, str, int], tuple[dict[str, Any], bytes, bytes]] = {}

    def queue(self, name: str) -> Queue:
        """The BullMQ queue of that name on our connection."""
        if name not in self._queues:
            self._queues[name] = Queue(name, {"connection": self.redis, "prefix": self.prefix})
        return self._queues[name]

    def ref(self, request: JobRequest) -> JobRef:
        """Where the job of this request is, or will be."""
        name, key = request.name, request.key
        if not request.queue and self._queue_of is None:
            raise ValueError(f"which queue is {name} for? Say JobRequest(…, queue=…), or add validated(jobs)")
        return JobRef(request.queue or self._queue_of(name), name, job_id(name, key), key)

    async def enqueue(self, request: JobRequest) -> JobRef:
        """Add one job, or one flow when the request has children: these run first, all or none are added."""
        jobs = self.outgoing(request).tree()
        add = partial(self._flows.add_flow, self) if request.children else self._add
        await self._through(jobs, partial(self._bounded_add, [jobs], add))
        return jobs[0].ref

    async def enqueue_many(self, requests: Sequence[JobRequest]) -> list[JobRef]:
        """Add many jobs in one round trip per queue. When it raises, part of them may be there: enqueue all again."""
        if any(request.children for request in requests):
            raise ValueError("enqueue_many takes plain jobs; add flows one by one with enqueue")
        batches: dict[str, list[Outgoing]] = {}
        for job in (jobs := [self.outgoing(request) for request in requests]):
            batches.setdefault(job.ref.queue, []).append(job)
        if jobs:
            await self._through(jobs, partial(self._bounded_add, batches.values(), self._add, 1 / 1_000))
        return [job.ref for job in jobs]

    async def prepared(self, request: JobRequest) -> Outgoing:
        """The job of this request after all steps, and its children likewise; nothing goes into a queue."""
        job = self.outgoing(request)
        await self._through(job.tree(), partial(asyncio.sleep, 0))
        return job

    def outgoing(self, request: JobRequest) -> Outgoing:
        """The job of this request before any step, with the options that every job gets; its children likewise."""
        if request.children:
            if self._flows is None:
                raise ValueError("this request has children: Producer(…, flow.Flows()) adds them")
            self._flows.check(request)
        ref, delay, data = self.ref(request), request.delay, request.payload
        if not isinstance(delay, int | float) or not 0 <= delay <= MAX_DELAY:
            raise InvalidDelay(f"delay {str(delay)[:50]}: {InvalidDelay.__doc__}")
        opts = {"attempts": 0, "priority": int(priority_of(request.priority)), **self._kept}
        if delay:
            opts["delay"] = int(delay * 1000)
        children = [self.outgoing(child) for child in request.children]
        return Outgoing(request, ref, dict(data) if isinstance(data, Mapping) else data, opts, children)

    async def _through(self, jobs: Sequence[Outgoing], add: AddNext) -> None:
        for step in reversed(self._steps):
            add = partial(step, jobs, add)
        await add()

    async def _bounded_add(self, batches: Iterable[Sequence[Outgoing]], add: WithJobs, each: float = 0.0) -> None:
        try:  # as in `bounded`, whose generator would cost as much again
            for jobs in batches:
                async with asyncio.timeout(self._timeout + each * len(jobs)), self._turns:
                    if self.admission:
                        await self.admission(jobs)
                    await add(jobs)
        except (RedisError, OSError) as error:
            raise QueueUnavailable(f"{QueueUnavailable.__doc__} ({type(error).__name__})") from error

    async def _add(self, jobs: Sequence[Outgoing]) -> None:
        """All of one queue, in one round trip."""
        queue, now = self.queue(jobs[0].ref.queue), round(time.time() * 1000)
        calls: list[bytes] = []
        for _, alike in groupby(jobs, lambda job: (job.ref.name, job.opts)):
            while some := list(islice(alike, AT_ONCE)):
                calls.append(self._call(queue, some, now))
        replies = await self._send(b"".join(calls), len(calls))
        if any(isinstance(reply, NoScriptError) for reply in replies):  # a server that never saw it, or was restarted
            await self._send(b"*3\r\n" + _arguments(b"SCRIPT", b"LOAD", _ADD), 1)
            replies = await self._send(b"".join(calls), len(calls))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        if any(found := [*chain(*replies)]):
            self.refuse_twins(jobs, [was or (None, None, None) for was in found], now)

    def _call(self, queue: Queue, jobs: Sequence[Outgoing], now: int) -> bytes:
        """The command that adds jobs of one name and with the same options, in Redis' protocol."""
        opts, base, ref = jobs[0].opts, queue.keys[""], jobs[0].ref
        like = ref.queue, ref.name, len(jobs)
        known, begin, about = self._shared.get(like, ({}, b"", b""))
        if opts != known:
            count = len(_KEYS) + len(jobs)
            keys = (queue.keys[name].encode() for name in _KEYS)
            begin = b"*%d\r\n" % (count + len(jobs) + 8) + _arguments(b"EVALSHA", _SHA, b"%d" % count, *keys)
            numbers = (b"%d" % opts["priority"], b"%d" % opts.get("delay", 0))
            about = _arguments(ref.name.encode(), compact(queue.scripts.encodeOpts(opts)).encode(), *numbers)
            self._shared[like] = ({**opts}, begin, about)
        ids = [(base + job.ref.id).encode() for job in jobs]
        return begin + _arguments(*ids) + about + _arguments(b"%d" % now, *[job.text.encode() for job in jobs])

    async def _send(self, commands: bytes, count: int, *, again: bool = True) -> list[Any]:
        """In one write; refusals are among the replies. A broken connection is replaced once: a restart breaks all."""
        pool: Any = self.redis.connection_pool
        connection = self._idle.pop() if self._idle else await pool.get_connection()
        try:
            if not connection.is_connected or connection._writer.is_closing() or connection._reader.at_eof():
                raise ConnectionError("the server has closed the connection")
            # Past redis-py's own calls for it, which take longer than all the rest of an add; `bounded` is the limit.
            connection._writer.write(commands)
            replies = [await connection._parser.read_response() for _ in range(count)]
            for reply in replies:
                if isinstance(reply, ResponseError) and (why := meaning(reply)) is not reply:
                    raise why
        except BaseException as error:  # replies may still come that nobody would read
            ended = [connection]
            if broken := isinstance(error, ConnectionError | OSError):  # what ended this one has ended them all
                ended += self._idle
                self._idle.clear()
            for each in ended:
                await each.disconnect(nowait=True)
                await pool.release(each)
            if broken and again:
                return await self._send(commands, count, again=False)
            raise
        # Not to the pool: returning and fetching it would take a fifth of the time of an add.
        self._idle.append(connection)
        return replies

    def refuse_twins(self, jobs: Sequence[Outgoing], twins: Sequence[Sequence[Any]], now: int) -> None:
        """`twins`: what was under each id: its score in the failed set, its data, and when it was added."""
        failed: list[str] = []
        for job, (score, text, added) in zip(jobs, twins, strict=True):
            same = bool(text) and payload_of(json.loads(text)) == payload_of(job.data)
            if same and added == str(now):  # by this very call: its answer was lost, or the job is fast
                continue
            if score is not None:
                failed.append(job.ref.id)
            elif text is not None and not same:
                raise KeyReused(f"{job.ref.id}: {KeyReused.__doc__}")
        if failed:
            raise FailedTwin(f"{', '.join(failed[:5])}: {FailedTwin.__doc__}")

    @asynccontextmanager
    async def bounded(self, timeout: float | None = None) -> AsyncIterator[None]:
        """Calls on our connection get their answer or `QueueUnavailable`, in time, whatever state Redis is in."""
        try:
            async with asyncio.timeout(timeout or self._timeout), self._turns:
                yield
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise QueueUnavailable(f"{QueueUnavailable.__doc__} ({type(error).__name__})") from error

    async def close(self) -> None:
        await self.redis.aclose()


def _arguments(*parts: bytes) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])

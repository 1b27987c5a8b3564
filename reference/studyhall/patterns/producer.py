"""The one way jobs get into a queue: named by business key, bounded, never hanging, and prepared by a list of steps.

    producer = Producer(
        url, validated(jobs), tracing_adds(), signing(signer), small(), admission=Admission(…), flows=Flows()
    )
    await producer.enqueue(JobRequest("resize", {"image": 7}, key="image-7"))

Promise: `enqueue` answers within `timeout` seconds whatever state Redis is in. When it returns, the job is in
the queue, once per business key. When it raises `QueueUnavailable`, enqueue again with the same key: an add
that landed although its answer was lost is the same job, not a second one. The same key with another payload is
refused (`KeyTaken`), not silently taken for a repetition.

It does not hold across the loss of Redis' data (see the outbox for work that must not depend on it), and a
key is only remembered as long as the job is retained; later repeats are stopped by the idempotency marker.
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, Protocol

import msgpack
from bullmq import Queue
from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError

from .core.connections import meaning, producer_client
from .core.failures import FailedTwin, InvalidDelay, Permanent, QueueUnavailable
from .core.request import AddNext, AddStep, JobRef, JobRequest, Outgoing, payload_of
from .job_ids import job_id
from .priority import priority_of

__all__ = ["FailedTwin", "JobRef", "JobRequest", "KeyTaken", "Producer", "QueueUnavailable"]

MAX_ADDS = 16  # at once, by one producer: more would only open more connections
DAY = 24 * 3600
MAX_DELAY = 366 * DAY
# How long finished jobs stay (otherwise forever), as in `retention.DEFAULT`.
KEPT = {
    "removeOnComplete": {"count": 1_000, "age": DAY},
    "removeOnFail": {"age": 14 * DAY},
    "stackTraceLimit": 5,
    "keepLogs": 50,
}
# In the order in which BullMQ's scripts expect them; the last one is ours.
_KEYS = {
    "addDelayedJob": "marker meta id delayed completed events failed",
    "addPrioritizedJob": "marker meta id prioritized delayed completed active events pc failed",
}

Admit = Callable[[str, int, int], Awaitable[None]]  # (queue, jobs, priority); raises to refuse
_pack = msgpack.Packer().pack


class AddsFlows(Protocol):
    def check(self, request: JobRequest) -> None: ...
    async def add(self, producer: Any, jobs: Sequence[Outgoing]) -> None: ...


class Keeps(Protocol):
    def job_options(self) -> dict[str, Any]: ...


class KeyTaken(Permanent):
    """A job with this key and another payload is in the queue. One key names one request: take a new key."""


class Producer:
    """Open one per process; close it at the end.

    A step is `async def step(jobs, call_next)`: it checks or fills in the `Outgoing` jobs, then `await call_next()`.
    Without steps the payload goes into the queue as it is, with the `queue` that the request names. `admission` is
    asked before every add and raises `Overloaded` to refuse. `flow.Flows()` adds requests with children.
    """

    def __init__(
        self,
        url: str,
        *steps: AddStep,
        admission: Admit | None = None,
        flows: AddsFlows | None = None,
        prefix: str = "bull",
        timeout: float = 1.5,
        retention: Keeps | None = None,
    ) -> None:
        self._steps, self._flows = steps, flows
        self._queue_of = next((step.queue_of for step in steps if hasattr(step, "queue_of")), None)
        self._timeout, self._turns = timeout, asyncio.Semaphore(MAX_ADDS)
        self._kept = retention.job_options() if retention else KEPT
        self.admission, self.prefix = admission, prefix
        self.redis = producer_client(url, answer=timeout)
        self.options = {"connection": self.redis, "prefix": prefix}
        self._queues: dict[str, Queue] = {}
        self._idle: list[Any] = []  # connections of the pool; at most MAX_ADDS
        # By queue and job name: options, and what commands that add such a job share.
        self._shared: dict[tuple[str, str], tuple[dict[str, Any], bytes, bytes]] = {}

    def queue(self, name: str) -> Queue:
        """The BullMQ queue of that name on our connection."""
        if name not in self._queues:
            self._queues[name] = Queue(name, self.options)
        return self._queues[name]

    def queue_of(self, name: str) -> str:
        """The queue for jobs of that type."""
        if self._queue_of is None:
            raise ValueError(f"which queue is {name} for? Say JobRequest(…, queue=…), or add validated(jobs)")
        return str(self._queue_of(name))

    def ref(self, request: JobRequest) -> JobRef:
        """Where the job of this request is, or will be."""
        queue = request.queue or self.queue_of(request.name)
        return JobRef(queue, request.name, job_id(request.name, request.key), request.key)

    async def enqueue(self, request: JobRequest) -> JobRef:
        """Add one job, or one flow when the request has children: these run first, all or none are added."""
        jobs = self._outgoing(request).tree()
        add = partial(self._flows.add, self) if self._flows and request.children else self._add
        await self._through(jobs, partial(self._bounded_add, [jobs], add))
        return jobs[0].ref

    async def enqueue_many(self, requests: Sequence[JobRequest]) -> list[JobRef]:
        """Add many jobs in one round trip per queue. When it raises, part of them may be there: enqueue all again."""
        if any(request.children for request in requests):
            raise ValueError("enqueue_many takes plain jobs; add flows one by one with enqueue")
        batches: dict[str, list[Outgoing]] = {}
        for job in (jobs := [self._outgoing(request) for request in requests]):
            batches.setdefault(job.ref.queue, []).append(job)
        if jobs:
            await self._through(jobs, partial(self._bounded_add, batches.values(), self._add, 1 / 1_000))
        return [job.ref for job in jobs]

    async def prepared(self, request: JobRequest) -> Outgoing:
        """The job of this request after all steps, and its children likewise; nothing goes into a queue."""
        job = self._outgoing(request)
        await self._through(job.tree(), partial(asyncio.sleep, 0))
        return job

    def outgoing(self, ref: JobRef, request: JobRequest) -> Outgoing:
        """The job of this request before any step, with the options that every job gets."""
        delay, data = request.delay, request.payload
        if not isinstance(delay, int | float) or not 0 <= delay <= MAX_DELAY:
            raise InvalidDelay(f"delay {str(delay)[:50]}: {InvalidDelay.__doc__}")
        opts = {"attempts": 0, "priority": int(priority_of(request.priority)), **self._kept}
        if delay:
            opts["delay"] = int(delay * 1000)
        return Outgoing(request, ref, dict(data) if isinstance(data, Mapping) else data, opts)

    def _outgoing(self, request: JobRequest) -> Outgoing:
        if request.children:
            if self._flows is None:
                raise ValueError("this request has children: Producer(…, flows=flow.Flows()) adds them")
            self._flows.check(request)
        job = self.outgoing(self.ref(request), request)
        job.children = [self._outgoing(child) for child in request.children]
        return job

    async def _through(self, jobs: Sequence[Outgoing], add: AddNext) -> None:
        for step in reversed(self._steps):
            add = partial(step, jobs, add)
        await add()

    async def _bounded_add(
        self, batches: Iterable[Sequence[Outgoing]], add: Callable[..., Awaitable[None]], each: float = 0.0
    ) -> None:
        try:  # as in `bounded`, whose generator would cost as much again
            for jobs in batches:
                async with asyncio.timeout(self._timeout + each * len(jobs)), self._turns:
                    if self.admission:
                        wanted = Counter((job.ref.queue, job.opts["priority"]) for job in jobs)
                        for (queue, priority), count in wanted.items():
                            await self.admission(queue, count, priority)
                    await add(jobs)
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def _add(self, jobs: Sequence[Outgoing]) -> None:
        """All of one queue, in one round trip."""
        queue, now = self.queue(jobs[0].ref.queue), round(time.time() * 1000)
        calls = b"".join([self._call(queue, job, now) for job in jobs])
        replies = await self._send(calls, len(jobs))
        if any(isinstance(reply, NoScriptError) for reply in replies):  # a server that never saw it, or was restarted
            sources = [_asking(queue.scripts.commands[name].script)[1] for name in _KEYS]
            await self._send(
                b"".join(b"*3\r\n" + _arguments(b"SCRIPT", b"LOAD", each) for each in sources), len(sources)
            )
            replies = await self._send(calls, len(jobs))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply[0], int) and reply[0] < 0:
                raise queue.scripts.finishedErrors({"code": reply[0], "command": "addJob"})
        self.refuse_twins(jobs, [reply[1:] for reply in replies], now)

    def _call(self, queue: Queue, job: Outgoing, now: int) -> bytes:
        """The command that adds the job, in Redis' protocol: most of it is the same for all jobs of a type."""
        opts, base, ref = job.opts, queue.keys[""], job.ref
        known, begin, end = self._shared.get((ref.queue, ref.name), ({}, b"", b""))
        if opts != known:
            script = "addDelayedJob" if opts.get("delay") else "addPrioritizedJob"
            keys = [queue.keys[name].encode() for name in _KEYS[script].split()]
            sha, _ = _asking(queue.scripts.commands[script].script)
            # The job's key follows, and three arguments.
            begin = b"*%d\r\n" % (len(keys) + 7) + _arguments(b"EVALSHA", sha, b"%d" % (len(keys) + 1), *keys)
            end = _arguments(msgpack.packb(queue.scripts.encodeOpts(opts)))
            self._shared[ref.queue, ref.name] = ({**opts}, begin, end)
        about = _pack((base, ref.id, ref.name, now, None, None, None, None, None))
        return begin + _arguments((base + ref.id).encode(), about, job.text.encode()) + end

    async def _send(self, commands: bytes, count: int, *, again: bool = True) -> list[Any]:
        """In one write; what Redis refused is among the replies. A broken connection is replaced once: after a restart
        of Redis all of them are dead."""
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
            if score is text is None:
                continue
            stored = json.loads(text) if text else None
            same = payload_of(stored) == payload_of(job.data)
            if same and added == str(now):  # by this very call: its answer was lost, or the job is fast
                continue
            if score is not None:
                failed.append(job.ref.id)
            elif not same:
                raise KeyTaken(f"{job.ref.id}: {KeyTaken.__doc__}")
        if failed:
            raise FailedTwin(f"{', '.join(failed[:5])}: {FailedTwin.__doc__}")

    @asynccontextmanager
    async def bounded(self, timeout: float | None = None) -> AsyncIterator[None]:
        """Calls on our connection get their answer or `QueueUnavailable`, in time, whatever state Redis is in."""
        try:
            async with asyncio.timeout(timeout or self._timeout), self._turns:
                yield
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise _unavailable(error) from error

    async def close(self) -> None:
        await self.redis.aclose()


def _unavailable(error: Exception) -> QueueUnavailable:
    return QueueUnavailable(f"{QueueUnavailable.__doc__} ({type(error).__name__})")


def _arguments(*parts: bytes) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


@cache
def _asking(script: str) -> tuple[bytes, bytes]:
    """BullMQ silently ignores an existing id, even one in the failed set. So its script is made to return what was
    there: the id's score in the failed set, its data and its time. Returns SHA-1 and source."""
    source = f"""local was = redis.call('HMGET', KEYS[#KEYS], 'data', 'timestamp')
local failed = (was[1] or was[2]) and redis.call('ZSCORE', KEYS[#KEYS - 1], cmsgpack.unpack(ARGV[1])[2])
local function add()
{script}
end
return {{add(), failed, was[1], was[2]}}""".encode()
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode(), source

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import msgpack
from bullmq import Queue
from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError

from .core.connections import producer_client
from .core.failures import FailedTwin, InvalidDelay, Permanent, QueueUnavailable
from .core.request import AddNext, AddStep, JobRef, JobRequest, Outgoing
from .job_ids import job_id
from .priority import priority_of

_pack: Callable[[Any], Any] | None
try:
    from hiredis import pack_command as _pack
except ImportError:
    _pack = None

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
# In the order in which BullMQ's scripts expect them; the last two are ours.
_KEYS = {
    "addDelayedJob": ("marker", "meta", "id", "delayed", "completed", "events", "failed"),
    "addPrioritizedJob": (
        *("marker", "meta", "id", "prioritized", "delayed", "completed", "active", "events", "pc"),
        "failed",
    ),
}

Command = tuple[Any, ...]
Admit = Callable[[str, int, int], Awaitable[None]]  # (queue, jobs, priority); raises to refuse


class AddsFlows(Protocol):
    def check(self, request: JobRequest) -> None: ...
    async def add(self, producer: Any, root: Outgoing) -> None: ...


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
        jobs = list(_all(job := self._outgoing(request)))

        async def add() -> None:
            async with self.bounded():
                await self._admit(jobs)
                if self._flows and job.children:
                    await self._flows.add(self, job)
                    await self._ask_for_twins(jobs)
                else:
                    await self._add(jobs)

        await self._through(jobs, add)
        return job.ref

    async def enqueue_many(self, requests: Sequence[JobRequest]) -> list[JobRef]:
        """Add many jobs in one round trip per queue. When it raises, part of them may be there: enqueue all again."""
        if any(request.children for request in requests):
            raise ValueError("enqueue_many takes plain jobs; add flows one by one with enqueue")
        batches: dict[str, list[Outgoing]] = {}
        for job in (outgoing := [self._outgoing(request) for request in requests]):
            batches.setdefault(job.ref.queue, []).append(job)

        async def add() -> None:
            for jobs in batches.values():
                async with self.bounded(self._timeout + len(jobs) / 1_000):
                    await self._admit(jobs)
                    await self._add(jobs)

        if outgoing:
            await self._through(outgoing, add)
        return [job.ref for job in outgoing]

    async def checked(self, request: JobRequest) -> JobRequest:
        """The request as it can be stored and enqueued later: all of it validated, its payload as JSON."""
        job = self._outgoing(request)
        await self._through(list(_all(job)), partial(asyncio.sleep, 0))  # through the steps, into no queue
        return _as_json(job)

    async def admit(self, request: JobRequest) -> None:
        """Ask whether the queues take it, without adding it: `Overloaded` or `QueueUnavailable` if not."""
        async with self.bounded():
            await self._admit(list(_all(self._outgoing(request))), look=True)

    def outgoing(self, ref: JobRef, request: JobRequest) -> Outgoing:
        """The job of this request before any step, with the options that every job gets."""
        delay, data = request.delay, request.payload
        if not isinstance(delay, int | float) or not 0 <= delay <= MAX_DELAY:
            raise InvalidDelay(f"delay {str(delay)[:50]}: {InvalidDelay.__doc__}")
        opts = {"jobId": ref.id, "priority": int(priority_of(request.priority)), **self._kept}
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

    async def _add(self, jobs: Sequence[Outgoing]) -> None:
        """All of one queue, in one round trip."""
        queue = self.queue(jobs[0].ref.queue)
        calls = [_call(queue, job) for job in jobs]
        replies = await self._send(calls)
        if any(isinstance(reply, NoScriptError) for reply in replies):  # a server that never saw it, or was restarted
            await self._send([("SCRIPT", "LOAD", _asking(queue, kind)[1]) for kind in _KEYS])
            replies = await self._send(calls)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply[0], int) and reply[0] < 0:
                raise queue.scripts.finishedErrors({"code": reply[0], "command": "addJob"})
        _refuse_twins(jobs, [reply[1:] for reply in replies])

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        """In one write, with fewer calls than redis-py's pipeline makes; what Redis refused is among the replies. A
        broken connection is replaced once: after a restart of Redis all of them are dead."""
        with suppress(ConnectionError):
            return await self._send_once(commands)
        return await self._send_once(commands)

    async def _send_once(self, commands: Sequence[Command]) -> list[Any]:
        pool: Any = self.redis.connection_pool
        idle = self._idle.pop() if self._idle else None
        connection = idle or await pool.get_connection()
        limit = connection.socket_timeout
        try:
            if idle:
                await pool.ensure_connection(idle)
            connection.socket_timeout = None  # `bounded` is the limit, at less cost than one for each reply
            packed = [_pack(command) for command in commands] if _pack else connection.pack_commands(commands)
            await connection.send_packed_command(packed, check_health=False)
            replies = [await _reply(connection) for _ in commands]
            connection.socket_timeout = limit
        except BaseException:  # replies may still come that nobody would read
            connection.socket_timeout = limit
            await connection.disconnect(nowait=True)
            await pool.release(connection)
            while self._idle:  # what ended this one has ended them all
                await pool.release(self._idle.pop())
            raise
        # Not to the pool: returning and fetching it would take a fifth of the time of an add.
        self._idle.append(connection)
        return replies

    async def _ask_for_twins(self, jobs: Sequence[Outgoing]) -> None:
        commands: list[Command] = []
        for job in jobs:
            base = f"{self.prefix}:{job.ref.queue}:"
            commands += [("ZSCORE", f"{base}failed", job.ref.id), ("HGET", base + job.ref.id, "data")]
        replies = await self._send(commands)
        _refuse_twins(jobs, list(zip(replies[::2], replies[1::2], strict=True)))

    async def _admit(self, jobs: Sequence[Outgoing], *, look: bool = False) -> None:
        if self.admission:
            wanted = Counter((job.ref.queue, job.opts["priority"]) for job in jobs)
            for (queue, priority), count in wanted.items():
                await self.admission(queue, 0 if look else count, priority)

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


def _call(queue: Queue, job: Outgoing) -> Command:
    key, ident, opts, delay = queue.keys, job.ref.id, job.opts, job.opts.get("delay", 0)
    kind = "addDelayedJob" if delay else "addPrioritizedJob"
    keys = [*(key[name] for name in _KEYS[kind]), key[""] + ident]
    about = msgpack.packb([key[""], ident, job.ref.name, round(time.time() * 1000), None, None, None, None, None])
    # Without the id: it is the job's key already, and what all jobs of a type share is read once by the worker.
    options = msgpack.packb(
        queue.scripts.encodeOpts({"attempts": 0} | {name: opts[name] for name in opts if name != "jobId"})
    )
    when = delay or opts["priority"]
    return "EVALSHA", _asking(queue, kind)[0], len(keys), *keys, about, job.text, options, when, ident


def _asking(queue: Queue, kind: str) -> tuple[str, str]:
    return _asking_script(queue.scripts.commands[kind].script)


@cache
def _asking_script(script: str) -> tuple[str, str]:
    """BullMQ silently ignores an existing id, even one in the failed set. So its script is made to return what was
    there: the id's score in the failed set, and its data. Returns SHA-1 and source."""
    source = f"""local failed = redis.call('ZSCORE', KEYS[#KEYS - 1], ARGV[#ARGV])
local data = redis.call('HGET', KEYS[#KEYS], 'data')
local function add()
{script}
end
return {{add(), failed, data}}"""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest(), source


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as refused:
        return refused


def _refuse_twins(jobs: Sequence[Outgoing], twins: Sequence[Sequence[Any]]) -> None:
    """`twins`: what was under each id: its score in the failed set, and its data."""
    failed: list[str] = []
    for job, (score, text) in zip(jobs, twins, strict=True):
        if text is None and score is None:
            continue
        stored = json.loads(text) if text else None
        # One with our own data (its time and correlation id are in there) was added by this call.
        if stored == job.data:
            continue
        if score is not None:
            failed.append(job.ref.id)
        elif _payload(stored) != _payload(job.data):
            raise KeyTaken(f"{job.ref.id}: {KeyTaken.__doc__}")
    if failed:
        raise FailedTwin(f"{', '.join(failed[:5])}: {FailedTwin.__doc__}")


def _all(job: Outgoing) -> Iterator[Outgoing]:
    yield job
    for child in job.children:
        yield from _all(child)


def _as_json(job: Outgoing) -> JobRequest:
    children = [_as_json(child) for child in job.children]
    return replace(job.request, payload=_payload(job.data), children=children)


def _payload(data: Any) -> Any:
    """What the key stands for: the payload, without what differs between sends."""
    return data["payload"] if isinstance(data, dict) and "v" in data and "payload" in data else data

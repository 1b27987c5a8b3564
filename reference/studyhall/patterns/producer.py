"""The one way jobs get into a queue: validated, named by business key, signed, bounded, and never hanging.

Promise: `enqueue` answers within `timeout` seconds whatever state Redis is in. When it returns, the job is in
the queue, once per business key. When it raises `QueueUnavailable`, enqueue again with the same key: an add
that landed although its answer was lost is the same job, not a second one.

It does not hold across the loss of Redis' data (see the outbox for work that must not depend on it), and a
key is only remembered as long as the job is retained; later repeats are stopped by the idempotency marker.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bullmq import FlowProducer, Queue
from pydantic import BaseModel
from redis.exceptions import RedisError

from . import claim_check, flow, retention, tracing
from .backpressure import Admit
from .connections import producer_client
from .errors import InvalidDelay, JobError, Permanent
from .flow import OnFailure
from .job_ids import job_id
from .observability import correlation, current_correlation_id, new_correlation_id, trace_meta
from .priority import Priority, priority_of
from .retention import Retention
from .signed_payload import Signer
from .typed_jobs import JobType, JobTypes

__all__ = [
    "FailedTwin",
    "InvalidDelay",
    "InvalidMaxAge",
    "JobRef",
    "JobRequest",
    "Producer",
    "QueueUnavailable",
    "job_options",
]

MAX_ADDS = 16  # at once, by one producer: more would only open more connections
MAX_DELAY = 366 * 24 * 3600.0


class QueueUnavailable(JobError):
    """The queue did not answer in time. Nothing is lost: try again with the same key."""


class FailedTwin(JobError):
    """A job with this key failed and was not archived yet. Replay it from the dead letters instead."""


class InvalidMaxAge(Permanent):
    """`max_age` is not a number of seconds above 0. Leave it out for work that never gets too old."""


@dataclass(frozen=True, slots=True)
class JobRef:
    """Where the job is."""

    queue: str
    name: str
    id: str
    key: str


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What to run. `key` is what makes the request unique in the business, such as the order number.

    `max_age` counts from the due time by this producer's clock, and the worker compares with its own: a worker
    that is ahead drops the job early by as much (all of them, if that is more than `max_age`), one that is behind
    runs it late by as much. Make it far longer than your clocks may differ.
    """

    name: str
    payload: BaseModel | Mapping[str, Any]
    key: str
    delay: float = 0.0
    priority: str | Priority = Priority.NORMAL
    # Seconds after which running it is pointless; far more than the clocks of your machines differ.
    max_age: float | None = None
    children: Sequence[JobRequest] = field(default=())
    on_failure: str | OnFailure = OnFailure.WAIT  # as a child: what its failure does to its parent
    meta: Mapping[str, Any] = field(default_factory=dict)


def job_options(
    job_type: JobType[Any], priority: Priority, retention: Retention = retention.DEFAULT
) -> dict[str, Any]:
    """BullMQ's options for a job of this type; its id and delay come on top."""
    return {
        "attempts": job_type.retry.attempts,
        # What a stock worker would do; ours computes the delay itself, with jitter.
        "backoff": {"type": "exponential", "delay": int(job_type.retry.base * 1000)},
        "priority": int(priority),
        **retention.job_options(),
    }


class Producer:
    """Open one per process; close it at the end."""

    def __init__(
        self,
        jobs: JobTypes,
        url: str,
        *,
        signer: Signer | None = None,
        prefix: str = "bull",
        timeout: float = 1.5,
        meta: Callable[[], Mapping[str, Any]] = dict,
        admission: Admit | None = None,
        retention: Retention = retention.DEFAULT,
        max_payload: int = claim_check.MAX_PAYLOAD,
    ) -> None:
        self._jobs = jobs
        self._signer = signer
        self._timeout = timeout
        self._turns = asyncio.Semaphore(MAX_ADDS)
        self._retention = retention
        self._max_payload = max_payload  # bytes of a job's data as JSON
        self._meta = meta  # adds to every job's meta
        self.admission = admission  # asked before every add; it raises `Overloaded` to refuse
        self.prefix = prefix
        self.redis = producer_client(url)
        self._opts = {"connection": self.redis, "prefix": prefix}
        self._queues: dict[str, Queue] = {}
        self._flows: FlowProducer | None = None

    def queue(self, name: str) -> Queue:
        """The BullMQ queue of that name on our connection."""
        if name not in self._queues:
            self._queues[name] = Queue(name, self._opts)
        return self._queues[name]

    def queue_of(self, name: str) -> str:
        """The queue in which jobs of that type live."""
        return self._jobs[name].queue

    async def enqueue(self, request: JobRequest) -> JobRef:
        """Add one job, or one flow when the request has children: these run first, all or none are added."""
        ref = self.ref(request)
        with correlation(current_correlation_id()) as cid, tracing.enqueueing(ref.name, ref.queue, ref.id):
            return await (self._enqueue_flow if request.children else self._enqueue_one)(request, cid)

    async def _enqueue_one(self, request: JobRequest, cid: str) -> JobRef:
        node = self._node(request, cid)
        queue = self.queue(node["queueName"])
        ident = node["opts"]["jobId"]
        async with self.bounded():
            await self._admit([node])
            # Re-adding an id that sits in the failed set is silently ignored by BullMQ, so it is asked for in
            # the same breath; both commands travel together.
            await asyncio.gather(
                queue.add(node["name"], node["data"], node["opts"]), self._refuse_failed_twins([node])
            )
        return JobRef(node["queueName"], node["name"], ident, request.key)

    def checked(self, request: JobRequest) -> JobRequest:
        """The request as it can be stored and enqueued later: all of it validated, its payload as JSON."""
        data = self._node(request, "")["data"]
        return replace(
            request, payload=data["payload"], children=[self.checked(child) for child in request.children]
        )

    def ref(self, request: JobRequest) -> JobRef:
        """Where the job of this request is, or will be."""
        ident = job_id(request.name, request.key)
        return JobRef(self._jobs[request.name].queue, request.name, ident, request.key)

    async def admit(self, request: JobRequest) -> None:
        """Ask whether the queues take it, without adding it: `Overloaded` or `QueueUnavailable` if not."""
        async with self.bounded():
            await self._admit([self._tree(request, "")], look=True)

    async def enqueue_many(self, requests: Sequence[JobRequest]) -> list[JobRef]:
        """Add many jobs in one round trip per queue; about five times as fast as one by one."""
        refs: list[JobRef] = []
        batches: dict[str, list[dict[str, Any]]] = {}
        for request in requests:
            if request.children:
                raise ValueError("enqueue_many takes plain jobs; add flows one by one with enqueue")
            node = self._node(request, current_correlation_id() or new_correlation_id())
            batches.setdefault(node["queueName"], []).append(node)
            refs.append(JobRef(node["queueName"], node["name"], node["opts"]["jobId"], request.key))
        for name, nodes in batches.items():
            async with self.bounded(self._timeout + len(nodes) / 1_000):
                await self._admit(nodes)
                await asyncio.gather(self.queue(name).addBulk(nodes), self._refuse_failed_twins(nodes))
        return refs

    async def _enqueue_flow(self, request: JobRequest, cid: str) -> JobRef:
        if self._flows is None:
            self._flows = FlowProducer(self._opts)
        flow.check_size(request)
        node = self._tree(request, cid)
        async with self.bounded():
            await self._admit([node])
            await flow.check_parents(node, self.redis, self.prefix)
            await self._flows.add(node)
            await self._refuse_failed_twins(list(_all([node])))
        return JobRef(node["queueName"], node["name"], node["opts"]["jobId"], request.key)

    async def _refuse_failed_twins(self, nodes: Sequence[dict[str, Any]]) -> None:
        for name in {node["queueName"] for node in nodes}:
            queue, ours = self.queue(name), {n["opts"]["jobId"]: n for n in nodes if n["queueName"] == name}
            scores = await self.redis.zmscore(queue.toKey("failed"), list(ours))
            failed = [ident for ident, score in zip(ours, scores, strict=True) if score is not None]
            if not failed:
                continue
            async with self.redis.pipeline(transaction=False) as pipe:
                for ident in failed:
                    pipe.hget(queue.toKey(ident), "data")
                stored = await pipe.execute()
            # One with our own data (its time and correlation id are in there) was added, and has failed since.
            found = zip(failed, stored, strict=True)
            if twins := [i for i, data in found if data is None or json.loads(data) != ours[i]["data"]]:
                raise FailedTwin(f"{', '.join(twins[:5])}: {FailedTwin.__doc__}")

    async def _admit(self, nodes: Sequence[dict[str, Any]], *, look: bool = False) -> None:
        if self.admission is None:
            return
        wanted = Counter((node["queueName"], node["opts"]["priority"]) for node in _all(nodes))
        for (queue, priority), jobs in wanted.items():
            await self.admission(queue, 0 if look else jobs, priority)

    def _tree(self, request: JobRequest, cid: str) -> dict[str, Any]:
        node = self._node(request, cid)
        node["children"] = [self._tree(child, cid) for child in request.children]
        for child, made in zip(request.children, node["children"], strict=True):
            made["opts"] |= flow.edge_options(child.on_failure)
        return node

    def _node(self, request: JobRequest, cid: str) -> dict[str, Any]:
        job_type: JobType[Any] = self._jobs[request.name]
        delay = request.delay
        if not isinstance(delay, int | float) or not 0 <= delay <= MAX_DELAY:
            raise InvalidDelay(f"delay {str(delay)[:50]}: {InvalidDelay.__doc__}")
        max_age = request.max_age
        if max_age is not None and not (isinstance(max_age, int | float) and 0 < max_age < math.inf):
            raise InvalidMaxAge(f"max_age {str(max_age)[:50]}: {InvalidMaxAge.__doc__}")
        ident = job_id(request.name, request.key)
        meta = {
            "cid": cid,
            "at": int(time.time() * 1000),
            **({"max_age": max_age} if max_age else {}),
            **trace_meta(),
            **self._meta(),
            **request.meta,
        }
        data = {**self._jobs.encode(request.name, request.payload), "key": request.key, "meta": meta}
        data = self.sign(request.name, ident, data)
        claim_check.check_size(data, self._max_payload)
        opts = {"jobId": ident, **job_options(job_type, priority_of(request.priority), self._retention)}
        if delay:
            opts["delay"] = int(delay * 1000)
        return {"name": request.name, "queueName": job_type.queue, "data": data, "opts": opts}

    def sign(self, name: str, ident: str, data: dict[str, Any]) -> dict[str, Any]:
        return self._signer.sign(name, ident, data) if self._signer else data

    @asynccontextmanager
    async def bounded(self, timeout: float | None = None) -> AsyncIterator[None]:
        """Calls on our connection get their answer or `QueueUnavailable`, in time, whatever ails Redis."""
        try:
            async with asyncio.timeout(timeout or self._timeout), self._turns:
                yield
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise QueueUnavailable(f"{QueueUnavailable.__doc__} ({type(error).__name__})") from error

    async def close(self) -> None:
        await self.redis.aclose()


def _all(nodes: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from _all(node.get("children", ()))

"""Jobs that wait for other jobs: chains and fan-ins, added as one.

Promise: all jobs of a flow are added or none, so a crash of the producer, of a worker or between two steps
leaves no chain that ends in the middle. (Steps that enqueue the next one by hand lose the rest of the chain
when the process dies after the work and before the add, because the work is marked done.) A parent starts
when all its children have ended, and `ctx.children()` gives it their results. What a failed child does to its
parent is declared per child: see `OnFailure`. Adding a flow a second time changes nothing.

It does not hold for results in Redis beyond retention: store what matters, pass a reference. A job has one
parent: a child that waits for its place in another living flow is refused (`FlowConflict`). A flow is cancelled
as a whole. Redis Cluster is not supported.
"""

import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol

from bullmq import FlowProducer
from redis.asyncio import Redis

from .core.failures import Permanent
from .core.request import AddNext, JobRequest, Outgoing

__all__ = [
    "FlowConflict",
    "FlowTooLarge",
    "Flows",
    "OnFailure",
    "UnknownPolicy",
    "chain",
    "edge_options",
    "fan_in",
    "on_failure",
]

MAX_JOBS = 1_000  # one flow is one transaction in Redis, which serves nobody else meanwhile
MAX_DEPTH = 100  # BullMQ builds the tree by recursion


class OnFailure(StrEnum):
    """What the parent does when this child has failed for good."""

    WAIT = "wait"  # until the child is replayed from the dead letters and succeeds: nothing is skipped
    FAIL = "fail"  # fail too, at once; replaying the child brings the parent back as well
    IGNORE = "ignore"  # go on without its result; `ctx.failed_children()` says why


# BullMQ's fourth choice, continueParentOnFailure, is left out: it starts the parent while other children
# still run, and the Python worker then fails it for its pending dependencies.
_OPTIONS: dict[OnFailure, dict[str, Any]] = {
    OnFailure.WAIT: {},
    OnFailure.FAIL: {"failParentOnFailure": True},
    OnFailure.IGNORE: {"ignoreDependencyOnFailure": True},
}


class FlowConflict(Permanent):
    """The same job would have two parents. Give it its own key in each flow."""


class FlowTooLarge(Permanent):
    """A flow is added in one transaction, which blocks Redis. Let a job enqueue the rest, or add a batch job."""


class UnknownPolicy(Permanent):
    """A failing child's policy is wait, fail or ignore."""


def chain(*steps: JobRequest) -> JobRequest:
    """`chain(extract, graph, quiz)`: each step runs after the one before. Enqueue what this returns."""
    if not steps:
        raise ValueError("a chain needs at least one step")
    flow = steps[0]
    for step in steps[1:]:
        flow = replace(step, children=(*step.children, flow))
    return flow


def fan_in(parent: JobRequest, children: Sequence[JobRequest]) -> JobRequest:
    """`parent` runs once, after all `children`, which run side by side."""
    return replace(parent, children=(*parent.children, *children))


def on_failure(policy: str | OnFailure, *children: JobRequest) -> list[JobRequest]:
    """The same children, with this policy: `fan_in(report, on_failure("ignore", *optional))`."""
    edge_options(policy)
    return [replace(child, on_failure=policy) for child in children]


def edge_options(policy: str | OnFailure) -> dict[str, Any]:
    """BullMQ's options for a child with this policy."""
    try:
        return _OPTIONS[OnFailure(policy)]
    except ValueError:
        known = ", ".join(OnFailure)
        raise UnknownPolicy(f"{str(policy)[:50]!r}: {UnknownPolicy.__doc__} Known: {known}.") from None


class _Producer(Protocol):
    redis: Redis
    prefix: str

    def refuse_twins(self, jobs: Sequence[Outgoing], twins: Sequence[Sequence[Any]], now: int) -> None: ...


class Flows:
    """A step of a producer: a request with children is added with all below it, or not at all."""

    def __call__(self, jobs: Sequence[Outgoing], call_next: AddNext) -> Awaitable[None]:
        for job in jobs:
            for child in job.children:
                child.opts |= edge_options(child.request.on_failure)
        return call_next()

    def check(self, request: JobRequest) -> None:
        """Raise `FlowTooLarge` before anything is built."""
        jobs, level, depth = 0, [request], 0
        while level:
            jobs, depth = jobs + len(level), depth + 1
            if jobs > MAX_JOBS or depth > MAX_DEPTH:
                raise FlowTooLarge(f"over {MAX_JOBS} jobs or {MAX_DEPTH} levels. {FlowTooLarge.__doc__}")
            level = [child for parent in level for child in parent.children]

    async def add_flow(self, producer: _Producer, jobs: Sequence[Outgoing]) -> None:
        """`jobs`: the root, then all below it. Raises when one was there already, failed or with another payload."""
        now = round(time.time() * 1000)
        node = _tree(jobs[0], now)
        await check_parents(node, producer.redis, producer.prefix)
        await FlowProducer({"connection": producer.redis, "prefix": producer.prefix}).add(node)
        producer.refuse_twins(jobs, await _present(producer, jobs), now)


async def _present(producer: _Producer, jobs: Sequence[Outgoing]) -> list[tuple[Any, Any, Any]]:
    async with producer.redis.pipeline(transaction=False) as pipe:
        for job in jobs:
            base = f"{producer.prefix}:{job.ref.queue}:"
            pipe.zscore(f"{base}failed", job.ref.id)
            pipe.hmget(base + job.ref.id, "data", "timestamp")
        replies = await pipe.execute()
    return [(score, *fields) for score, fields in zip(replies[::2], replies[1::2], strict=True)]


def _tree(job: Outgoing, now: int) -> dict[str, Any]:
    children = [_tree(child, now) for child in job.children]
    opts = {**job.opts, "jobId": job.ref.id, "timestamp": now}
    return {"name": job.ref.name, "queueName": job.ref.queue, "data": job.data, "opts": opts, "children": children}


async def check_parents(root: dict[str, Any], redis: Redis, prefix: str) -> None:
    """Raise `FlowConflict` when a job of this tree would have two parents, here or in another living flow.

    BullMQ silently adds the new parent without such a child: it then waits forever, or not long enough.
    """
    edges: dict[str, str] = {}
    for parent, child in _edges(root, prefix):
        if child in edges or child == _key(root, prefix):
            raise FlowConflict(f"{child} is in this flow twice. {FlowConflict.__doc__}")
        edges[child] = parent
    async with redis.pipeline(transaction=False) as pipe:
        for child in edges:
            pipe.hget(child, "parentKey")
        others = await pipe.execute()
    for (child, parent), other in zip(edges.items(), others, strict=True):
        if other and other != parent and await redis.exists(other):
            raise FlowConflict(f"{child} belongs to the flow of {other}. {FlowConflict.__doc__}")


def _edges(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for child in node.get("children", ()):
        yield _key(node, prefix), _key(child, prefix)
        yield from _edges(child, prefix)


def _key(node: dict[str, Any], prefix: str) -> str:
    return f"{prefix}:{node['queueName']}:{node['opts']['jobId']}"

"""Run a stock BullMQ worker or a ReliableWorker for the length of a `with` block, and look at its queue."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bullmq import Queue, Worker

from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.worker_connections import events_client

from .waiting import until

Processor = Callable[[Any, str], Awaitable[Any]]


@contextlib.asynccontextmanager
async def at_work(queue: str, processor: Processor, **options: Any) -> AsyncIterator[ReliableWorker]:
    """A polling ReliableWorker; drained without grace at the end, whatever the test did."""
    worker = ReliableWorker(queue, processor, **options)
    running = asyncio.create_task(worker.run())
    try:
        ready = asyncio.create_task(worker.ready())
        await asyncio.wait({ready, running}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), "the worker is not ready after 20 s"
        yield worker
    finally:
        await worker.drain(0)
        await running


@contextlib.asynccontextmanager
async def stock_at_work(queue: str, processor: Processor, *, connection: Any, **options: Any) -> AsyncIterator[Any]:
    """BullMQ's own worker, started as its documentation says; ended by force, since it may hang."""
    worker = Worker(queue, processor, {"connection": connection, "autorun": False, **options})
    running = asyncio.create_task(worker.run())
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it leaves exceptions unretrieved
    try:
        yield worker
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(worker.close(force=True), 5)
        running.cancel()
        await asyncio.wait({running}, timeout=5)


@contextlib.asynccontextmanager
async def queue_at(url: str, name: str) -> AsyncIterator[Any]:
    queue = Queue(name, {"connection": events_client(url)})
    try:
        yield queue
    finally:
        await queue.close()


async def counts(queue: Any) -> dict[str, int]:
    """Jobs by state, without empty states."""
    return {state: count for state, count in (await queue.getJobCounts()).items() if count}


async def until_counts(queue: Any, states: dict[str, int], timeout: float, what: str) -> None:
    last: dict[str, int] = {}

    async def as_told() -> Any:
        nonlocal last
        last = await counts(queue)
        return last == states

    await until(as_told, timeout, lambda: f"{what}: {states}, there are {last}")

"""While the queue is away requests are taken into the database; when it is back each is queued once."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.request import JobRef, JobRequest, Outgoing
from studyhall.patterns.degraded import DegradedProducer
from studyhall.patterns.degraded.pending import drain, pending


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


class Producer:
    """Stands for the one that talks to Redis."""

    admission = None

    def __init__(self) -> None:
        self.away, self.queued = True, list[str]()

    def ref(self, request: JobRequest) -> JobRef:
        return JobRef("mails", request.name, f"{request.name}-{request.key}", request.key)

    async def prepared(self, request: JobRequest) -> Outgoing:
        return Outgoing(request, self.ref(request), request.payload, {})

    def bounded(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def enqueue(self, request: JobRequest) -> JobRef:
        if self.away:
            raise QueueUnavailable("Redis does not answer")
        self.queued.append(request.key)
        return self.ref(request)


async def test_an_outage_loses_no_request_and_duplicates_none(store: AsyncEngine):
    queue = Producer()
    producer = DegradedProducer(queue, store)
    for key in ("order-1", "order-2", "order-1"):
        assert not (await producer.enqueue(JobRequest("mail", {}, key=key))).queued
    assert (await pending(store)).waiting == 2
    assert (await drain(store, queue)).unavailable
    queue.away = False
    assert (await drain(store, queue)).queued == 2
    assert queue.queued == ["order-1", "order-2"]
    assert (await pending(store)).waiting == 0

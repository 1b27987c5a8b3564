"""One queue with its database: enqueue through the Producer, run through the Pipeline, look at what happened."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.backpressure import max_age
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.checkpoint import checkpointed
from studyhall.patterns.claim_check import MAX_PAYLOAD, max_payload, small
from studyhall.patterns.core.execution import Step
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.deadline import within_deadline
from studyhall.patterns.flow import Flows
from studyhall.patterns.idempotency.once import inboxes, once
from studyhall.patterns.observability import JsonLines, logged
from studyhall.patterns.observability.metrics import JobMetrics, measured
from studyhall.patterns.pipeline import Pipeline
from studyhall.patterns.producer import JobRequest, Producer
from studyhall.patterns.progress import reporting
from studyhall.patterns.schedule import signing_id
from studyhall.patterns.signed_payload import Signer, signed, signing
from studyhall.patterns.stall_budget import CRASH_LIMIT, crash_budget
from studyhall.patterns.store_gate import store_gate
from studyhall.patterns.tracing import traced, tracing_adds
from studyhall.patterns.typed_jobs import JobTypes, typed, validated

from .waiting import until
from .workers import at_work

KEYS = ["the-first-signing-key-of-the-tests"]


def full_pipeline(
    jobs: JobTypes,
    store: AsyncEngine,
    *steps: Step,
    signer: Signer | None = None,
    services: Any = None,
    metrics: JobMetrics | None = None,
    log: logging.Logger | None = None,
    crash_limit: int = CRASH_LIMIT,
    most_bytes: int = MAX_PAYLOAD,
) -> Pipeline:
    """Every step there is; `steps` stand between the checks and `once`."""
    return Pipeline(
        logged(log),
        measured(metrics or JobMetrics()),
        traced(),
        max_payload(most_bytes),
        *([signed(signer, signing_id)] if signer else []),
        typed(jobs),
        crash_budget(crash_limit),
        max_age(),
        store_gate(),
        *steps,
        once(inboxes(store)),
        within_deadline(),
        reporting(),
        checkpointed(store),
        services=services,
    )


def full_producer(
    jobs: JobTypes, url: str, *, signer: Signer | None = None, most_bytes: int = MAX_PAYLOAD, **options: Any
) -> Producer:
    """Every step there is."""
    steps = [validated(jobs), tracing_adds(), *([signing(signer)] if signer else []), small(most_bytes)]
    return Producer(url, *steps, Flows(), **options)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


class JobSetup:
    """`async with JobSetup.open(url, tmp_path, jobs) as setup`: a producer, a store and workers on demand."""

    store: AsyncEngine
    signer: Signer
    producer: Producer

    def __init__(self, url: str, jobs: JobTypes) -> None:
        self.url, self.jobs = url, jobs
        self.metrics = JobMetrics()
        self._log = logging.Logger("jobs", "DEBUG")
        self._handler = _Lines()
        self._log.addHandler(self._handler)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, url: str, directory: Path | str, jobs: JobTypes, *, signer: Signer | None = None, **options: Any
    ) -> AsyncIterator[JobSetup]:
        """`directory`: a folder for SQLite, or a database URL. `options` go to the Producer."""
        setup = cls(url, jobs)
        setup.store = open_store(directory if isinstance(directory, str) else f"sqlite:///{directory / 'setup.db'}")
        await create_all(setup.store)
        setup.signer = signer or Signer(KEYS)
        setup.producer = full_producer(jobs, url, signer=setup.signer, **{"timeout": 10.0, **options})
        try:
            yield setup
        finally:
            await setup.producer.close()
            await close(setup.store)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log lines of the executions so far."""
        return self._handler.lines

    def outcomes(self, job_id: str) -> list[str]:
        return [line["outcome"] for line in self.lines if line["job_id"] == job_id]

    @contextlib.asynccontextmanager
    async def working(
        self, *queues: str, steps: Sequence[Step] = (), concurrency: int = 10, lock: float = 5.0, **options: Any
    ) -> AsyncIterator[list[ReliableWorker]]:
        """A worker per queue (default: all); `steps` and `options` go to `full_pipeline`."""
        defaults: dict[str, Any] = {"signer": self.signer, "metrics": self.metrics, "log": self._log}
        pipeline = full_pipeline(self.jobs, self.store, *steps, **{**defaults, **options})
        async with contextlib.AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    at_work(
                        queue, pipeline, url=self.url, concurrency=concurrency, lock_duration=lock, stalled_interval=1.0
                    )
                )
                for queue in queues or self.jobs.queues
            ]

    async def state(self, request: JobRequest) -> str:
        ref = self.producer.ref(request)
        return str(await self.producer.queue(ref.queue).getJobState(ref.id))

    async def job(self, request: JobRequest) -> Any:
        ref = self.producer.ref(request)
        return await self.producer.queue(ref.queue).getJob(ref.id)

    async def ended(self, *requests: JobRequest, timeout: float = 90) -> list[str]:
        """The states of these jobs, once each is completed or failed."""

        async def states() -> list[str]:
            now = [await self.state(request) for request in requests]
            return now if all(state in ("completed", "failed") for state in now) else []

        return await until(states, timeout, f"{len(requests)} jobs ended", every=0.05)

    async def counts(self, queue: str) -> dict[str, int]:
        counts = await self.producer.queue(queue).getJobCounts()
        return {state: count for state, count in counts.items() if count}

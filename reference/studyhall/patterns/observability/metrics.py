"""Prometheus metrics of executions.

Promise: one count and two observations per execution, a count per class of error, and one per job that was found
without a living worker (`count_stalls`); label values found in a queue cannot grow them forever.
Each process measures itself: scrape every worker. A job that stalls is counted by the worker that finds it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from ..core.execution import CallNext, JobContext, Step
from ..core.job import Outcome

__all__ = ["JobMetrics", "measured", "serve_metrics"]

OTHER = "other"
MAX_SERIES = 200
_FAILED = (Outcome.RETRY, Outcome.PERMANENT, Outcome.EXHAUSTED)
QUICK_TO_DAY = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


def measured(metrics: JobMetrics) -> Step:
    """Count and time every execution. Next to `logged`, outside all that can raise."""

    async def measured(run: JobContext, call_next: CallNext) -> Any:
        waited, started = max(0.0, run.waited), time.perf_counter()
        try:
            with metrics.running(run.queue, run.name):
                return await call_next(run)
        except BaseException as raised:
            if run.conclude(raised).outcome in _FAILED:
                metrics.failed(run.queue, raised)
            raise
        finally:
            metrics.observe(run.queue, run.name, run.ended, time.perf_counter() - started, waited)

    return measured


class JobMetrics:
    """Prometheus metrics on a registry of their own, so that two of them in a process do not clash."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        registry, labels = self.registry, ("queue", "name")
        self._jobs = Counter("jobs", "Executions by outcome", (*labels, "outcome"), registry=registry)
        self._duration = Histogram("job_duration_seconds", "Run time", labels, buckets=QUICK_TO_DAY, registry=registry)
        self._wait = Histogram("job_wait_seconds", "Due time to start", labels, buckets=QUICK_TO_DAY, registry=registry)
        self._running = Gauge("jobs_running", "Executions going on now", labels, registry=registry)
        self._errors = Counter(
            "job_errors",
            "Failed executions by class of error; CrashLoop: given up after too many crashes",
            ("queue", "error"),
            registry=registry,
        )
        self._stalls = Counter(
            "job_stalls", "Jobs whose worker died or hung, found by this one", ("queue",), registry=registry
        )
        self._classes: set[tuple[str, str]] = set()
        self._bound: dict[tuple[str, str], tuple[Histogram, Histogram, Gauge]] = {}
        self._counters: dict[tuple[str, str, str], Counter] = {}

    def observe(self, queue: str, name: str, outcome: str, duration: float, waited: float) -> None:
        """Count one execution; seconds of running, and of waiting since it was due."""
        run, wait, _ = self._series(queue, name)
        run.observe(duration)
        wait.observe(waited)
        key = (queue, name if (queue, name) in self._bound else OTHER, str(outcome))
        if (counter := self._counters.get(key)) is None:  # `labels()` costs more than counting: ask it once
            counter = self._counters[key] = self._jobs.labels(*key)
        counter.inc()

    def failed(self, queue: str, error: BaseException) -> None:
        """Count an error by its class."""
        key = (queue, type(error).__name__)
        if key not in self._classes and len(self._classes) >= MAX_SERIES:
            key = (queue, OTHER)
        self._classes.add(key)
        self._errors.labels(*key).inc()

    def count_stalls(self, worker: Any) -> None:
        """Of this worker's queue: `metrics.count_stalls(ReliableWorker(…))`. From now on 0 is shown too."""
        stalls = self._stalls.labels(worker.name)
        worker.on("stalled", lambda _job_id: stalls.inc())

    @contextmanager
    def running(self, queue: str, name: str) -> Iterator[None]:
        """Count what happens inside as going on."""
        gauge = self._series(queue, name)[2]
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def render(self) -> bytes:
        """Text for /metrics."""
        return generate_latest(self.registry)

    def _series(self, queue: str, name: str) -> tuple[Histogram, Histogram, Gauge]:
        key = (queue, name)
        if (bound := self._bound.get(key)) is None:
            if len(self._bound) >= MAX_SERIES:  # anyone who can enqueue can invent names
                key = (queue, OTHER)
            bound = (self._duration.labels(*key), self._wait.labels(*key), self._running.labels(*key))
            self._bound.setdefault(key, bound)
        return bound


def serve_metrics(metrics: JobMetrics, port: int, host: str = "127.0.0.1") -> None:
    """Serve /metrics from a thread of its own, so that a busy event loop is still seen."""
    start_http_server(port, addr=host, registry=metrics.registry)

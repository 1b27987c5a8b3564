"""Prometheus metrics of executions.

Promise: one count and two observations per execution, a count per class of error, and one per job that was found
without a living worker (`count_stalls`); label values found in a queue cannot grow them forever. Executions
add to plain numbers, which become metrics when scraped.
Each process measures itself: scrape every worker. A job that stalls is counted by the worker that finds it. `observe`
and `running` are for one event loop: from several threads at once, counts get lost.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.execution import CallNext, JobContext, Step
from ..core.job import Outcome

__all__ = ["JobMetrics", "measured", "serve_metrics"]

OTHER = "other"
MAX_SERIES = 200
_FAILED = (Outcome.RETRY, Outcome.PERMANENT, Outcome.EXHAUSTED)
QUICK_TO_DAY = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_LABELS = ("queue", "name")
_BOUNDS = [*(str(float(bound)) for bound in QUICK_TO_DAY), "+Inf"]


def measured(metrics: JobMetrics) -> Step:
    """Count and time every execution. Next to `logged`, outside all that can raise."""

    async def measured(run: JobContext, call_next: CallNext) -> Any:
        waited, started = run.waited, time.perf_counter()
        series = metrics.series(run.queue, run.name)
        series.running += 1
        try:
            return await call_next(run)
        except BaseException as raised:
            if run.conclude(raised).outcome in _FAILED:
                metrics.failed(run.queue, raised)
            raise
        finally:
            series.running -= 1
            series.ended(run.ended, time.perf_counter() - started, waited if waited > 0 else 0.0)

    return measured


class _Series:
    """The numbers of one name on one queue."""

    __slots__ = ("durations", "outcomes", "running", "seconds", "waited", "waits")

    def __init__(self) -> None:
        self.running, self.seconds, self.waited = 0, 0.0, 0.0
        self.outcomes: Counts[str] = Counts()
        self.durations, self.waits = [0] * len(_BOUNDS), [0] * len(_BOUNDS)  # by bucket

    def ended(self, outcome: str, duration: float, waited: float) -> None:
        self.outcomes[str(outcome)] += 1
        self.durations[bisect_left(QUICK_TO_DAY, duration)] += 1
        self.waits[bisect_left(QUICK_TO_DAY, waited)] += 1
        self.seconds += duration
        self.waited += waited


class JobMetrics(Collector):
    """Prometheus metrics on a registry of their own, so that two of them in a process do not clash."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._series: dict[tuple[str, str], _Series] = {}
        self.registry.register(self)
        self._errors = Counter(
            "job_errors",
            "Failed executions by class of error; CrashLoop: given up after too many crashes",
            ("queue", "error"),
            registry=self.registry,
        )
        self._stalls = Counter(
            "job_stalls", "Jobs whose worker died or hung, found by this one", ("queue",), registry=self.registry
        )
        self._classes: set[tuple[str, str]] = set()

    def series(self, queue: str, name: str) -> _Series:
        if (series := self._series.get((queue, name))) is None:
            # Anyone who can enqueue can invent names.
            key = (queue, name if len(self._series) < MAX_SERIES else OTHER)
            series = self._series.setdefault(key, _Series())
        return series

    def observe(self, queue: str, name: str, outcome: str, duration: float, waited: float) -> None:
        """Count one execution; seconds of running, and of waiting since it was due."""
        self.series(queue, name).ended(outcome, duration, waited)

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
        """Count the block as a running execution."""
        series = self.series(queue, name)
        series.running += 1
        try:
            yield
        finally:
            series.running -= 1

    def collect(self) -> Iterator[Metric]:
        """For the registry, from whichever thread serves the scrape."""
        jobs = CounterMetricFamily("jobs", "Executions by outcome", labels=(*_LABELS, "outcome"))
        duration = HistogramMetricFamily("job_duration_seconds", "Run time", labels=_LABELS)
        wait = HistogramMetricFamily("job_wait_seconds", "Due time to start", labels=_LABELS)
        running = GaugeMetricFamily("jobs_running", "Executions going on now", labels=_LABELS)
        for key, series in self._series.copy().items():
            for outcome, count in series.outcomes.copy().items():
                jobs.add_metric((*key, outcome), count)
            duration.add_metric(key, list(zip(_BOUNDS, accumulate(series.durations), strict=True)), series.seconds)
            wait.add_metric(key, list(zip(_BOUNDS, accumulate(series.waits), strict=True)), series.waited)
            running.add_metric(key, series.running)
        yield from (jobs, duration, wait, running)

    def render(self) -> bytes:
        """Text for /metrics."""
        return generate_latest(self.registry)


def serve_metrics(metrics: JobMetrics, port: int, host: str = "127.0.0.1") -> None:
    """Serve /metrics from a thread of its own, so that a busy event loop is still seen."""
    start_http_server(port, addr=host, registry=metrics.registry)

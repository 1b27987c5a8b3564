"""Observability: one structured line and one measurement per execution, and no secrets in either.

Promise: every execution logs one line with job id, name, queue, attempt, outcome, duration, correlation id
and worker, as a JSON object written in one piece. The payload is never part of it; errors, messages and extra
fields are redacted (see `redaction`). The correlation id and the trace context travel from the producer to
the worker and on to child jobs. Metric labels are bounded: names found in a queue cannot grow them for ever.

Does not hold for handlers that somebody else adds to the root logger. Each process measures itself: scrape
every worker.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO

from opentelemetry import context as otel_context
from opentelemetry import propagate
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from .core.redaction import redact, redact_text

__all__ = [
    "JobMetrics",
    "bind",
    "configure_logging",
    "correlation",
    "current_correlation_id",
    "log_execution",
    "new_correlation_id",
    "serve_metrics",
    "trace_meta",
]

WORKER = f"{socket.gethostname()}:{os.getpid()}"
OTHER = "other"
MAX_SERIES = 200
QUICK_TO_DAY = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_GOOD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEVELS = {
    "retry": logging.WARNING,
    "permanent": logging.ERROR,
    "exhausted": logging.ERROR,
    "expired": logging.ERROR,
}

_correlation: ContextVar[str] = ContextVar("correlation_id", default="")
_fields: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039  never changed
_json = json.JSONEncoder(separators=(",", ":"), default=str).encode


def new_correlation_id() -> str:
    return uuid.uuid4().hex


def current_correlation_id() -> str:
    """The id of the request or job that this code works for; empty outside of one."""
    return _correlation.get()


@contextmanager
def correlation(ident: object = None, meta: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Work under this correlation id, or a new one when `ident` is none that we would write into a log.

    `meta` is what `trace_meta` returned at the producer: the trace goes on from there.
    """
    given = ident if isinstance(ident, str) and _GOOD_ID.fullmatch(ident) else new_correlation_id()
    was = _correlation.set(given)
    trace = None
    if meta and "traceparent" in meta:
        carrier = {k: v for k in ("traceparent", "tracestate") if isinstance(v := meta.get(k), str)}
        trace = otel_context.attach(propagate.extract(carrier))
    try:
        yield given
    finally:
        if trace is not None:
            otel_context.detach(trace)
        _correlation.reset(was)


def trace_meta() -> dict[str, str]:
    """What a producer adds to a job's meta: the W3C trace context, when a span is open."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


@contextmanager
def bind(**fields: Any) -> Iterator[None]:
    """Add these fields to every line logged inside the block."""
    was = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(was)


def log_execution(
    logger: logging.Logger,
    *,
    job_id: object,
    name: str,
    queue: str,
    attempt: int,
    outcome: str,
    duration: float,
    error: BaseException | None = None,
    **extra: Any,
) -> None:
    """The one line of an execution, `duration` in seconds. A final failure is an error, a retry a warning."""
    level = _LEVELS.get(outcome, logging.INFO)
    if not logger.isEnabledFor(level):
        return
    fields = {
        "job_id": str(job_id),
        "name": name,
        "queue": queue,
        "attempt": attempt,
        "outcome": str(outcome),
        "duration_ms": round(duration * 1000, 3),
        **extra,
    }
    # The stack comes with the final failure only: five attempts need no five copies of it.
    info = (type(error), error, error.__traceback__) if error and level == logging.ERROR else None
    if error is not None:
        fields["error"] = error
    # Not logger.log(): that walks the stack for the caller's file and line, which costs as much as the line.
    record = logger.makeRecord(logger.name, level, "", 0, "job %s", (outcome,), info)
    record.fields = fields
    logger.handle(record)


class JsonLines(logging.Formatter):
    """A record as one line of JSON. Fields come from `extra={"fields": {...}}` and from `bind`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": redact_text(record.getMessage()),
        }
        if ident := _correlation.get():
            line["correlation_id"] = ident
        if bound := _fields.get():
            line |= redact(bound)
        if fields := getattr(record, "fields", None):
            line |= redact(fields)
        line["worker"] = WORKER
        if record.exc_info and record.exc_info[1]:
            line["stack"] = redact_text("".join(traceback.format_exception(record.exc_info[1], limit=-12)))
        return _json(line)


class HumanLines(JsonLines):
    """The same content for a terminal: `12:00:01 info    job completed name=… job_id=…`."""

    def format(self, record: logging.LogRecord) -> str:
        line = json.loads(super().format(record))
        clock, level, msg = line.pop("ts")[11:19], line.pop("level"), line.pop("msg")
        stack = line.pop("stack", "")
        for quiet in ("logger", "worker"):
            line.pop(quiet)
        details = " ".join(f"{key}={value}" for key, value in line.items())
        return f"{clock} {level:<7} {msg} {details}".rstrip() + (f"\n{stack}" if stack else "")


def configure_logging(
    level: int | str = "INFO", stream: TextIO | None = None, style: Literal["json", "human"] = "json"
) -> logging.Handler:
    """Make this the only output of the process's logs. Call it once, first thing."""
    handler = logging.StreamHandler(stream or sys.stderr)  # writes a line with its newline in one call
    handler.setFormatter(JsonLines() if style == "json" else HumanLines())
    # Nothing here prints them, and looking them up is a third of the cost of a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper() if isinstance(level, str) else level)
    return handler


class JobMetrics:
    """Prometheus metrics on a registry of their own, so that two of them in a process do not clash."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        registry, labels = self.registry, ("queue", "name")
        self._jobs = Counter("jobs", "Executions by outcome", (*labels, "outcome"), registry=registry)
        self._duration = Histogram(
            "job_duration_seconds", "Run time", labels, buckets=QUICK_TO_DAY, registry=registry
        )
        self._wait = Histogram(
            "job_wait_seconds", "Due time to start", labels, buckets=QUICK_TO_DAY, registry=registry
        )
        self._running = Gauge("jobs_running", "Executions going on now", labels, registry=registry)
        self.depth = Gauge("queue_depth", "Jobs by state", ("queue", "state"), registry=registry)
        self.oldest = Gauge(
            "queue_oldest_age_seconds", "Age of the oldest waiting job", ("queue",), registry=registry
        )
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


_second: tuple[int, str] = (0, "")


def _timestamp(created: float) -> str:
    global _second  # noqa: PLW0603  strftime costs more than the rest of the line, and most lines share a second
    whole = int(created)
    if _second[0] != whole:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return f"{_second[1]}.{int((created - whole) * 1000):03d}Z"

"""One trace from the request to the last job it caused, by OpenTelemetry.

Promise: the trace context travels inside the job, so the producer, every execution and the jobs that an
execution enqueues are one trace, with the right parents, across processes. One span per execution (of every
attempt), with the job's id, name, queue, attempt and outcome; never its payload. Errors are recorded by type
and redacted message. Without an SDK nothing is recorded: a few microseconds per job.

It does not hold for jobs that are scheduled by the queue itself: each run of a schedule starts a trace of its
own. Sampling is the SDK's: a trace that its root did not sample has no spans, everywhere.

Configure any SDK (`opentelemetry-instrument …`, or `to_file`) before the first job.
"""

import math
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from .core.execution import CallNext, JobContext, Step
from .core.failures import describe
from .core.job import current_correlation_id
from .core.redaction import redact_text
from .core.request import AddNext, AddStep, Outgoing, payload_of

__all__ = ["continued", "ended", "enqueueing", "executing", "to_file", "trace_meta", "traced", "tracing_adds"]

MAX_NAME = 100  # names found in a queue are anybody's text
_tracer = trace.get_tracer("queuesmith.jobs")
_GOOD = {"completed", "duplicate", "cancelled", "snoozed", "released"}


_asked_at, _was_off = -math.inf, True


def _off() -> bool:
    # Until somebody sets a provider this is the API's placeholder, whose empty spans cost 10 us each.
    # Asking for it costs 5 us (it reads the environment): while there is none, once a second is enough.
    global _asked_at, _was_off  # noqa: PLW0603
    if not _was_off or time.monotonic() - _asked_at > 1:
        _asked_at = time.monotonic()
        _was_off = isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    return _was_off


def traced() -> Step:
    """A span per execution, in the trace that its producer began."""

    def traced(run: JobContext, call_next: CallNext) -> Awaitable[Any]:
        if _off() and "traceparent" not in run.meta:  # nothing to record and nothing to pass on
            return call_next(run)
        return in_a_span(run, call_next)

    async def in_a_span(run: JobContext, call_next: CallNext) -> Any:
        error: BaseException | None = None
        with continued(run.meta), executing(run.name, run.queue, run.job_id, run.attempt) as span:
            try:
                return await call_next(run)
            except BaseException as raised:
                run.conclude(raised)
                error = raised
                raise
            finally:
                ended(span, run.ended, error)

    return traced


def tracing_adds() -> AddStep:
    """For a producer, before what signs: a span around the add, and its context in every job."""

    async def tracing_adds(jobs: Sequence[Outgoing], call_next: AddNext) -> None:
        if _off() and not otel_context.get_current():  # nothing to record and nothing to pass on
            await call_next()
            return
        first = jobs[0].ref
        with enqueueing(first.name, first.queue, first.id):
            carried = trace_meta()
            for job in jobs:
                if carried and payload_of(job.data) is not job.data:
                    job.data["meta"] = {**carried, **job.data.get("meta", {})}
            await call_next()

    return tracing_adds


def trace_meta() -> dict[str, str]:
    """The W3C trace context to put into a job's meta, when a span is open."""
    carrier: dict[str, str] = {}
    if otel_context.get_current():  # empty: nobody traces, and asking every propagator is costly
        propagate.inject(carrier)
    return carrier


@contextmanager
def continued(meta: Mapping[str, Any]) -> Iterator[None]:
    """Work in the trace whose context the producer put into `meta`."""
    if "traceparent" not in meta:
        yield
        return
    carrier = {k: v for k in ("traceparent", "tracestate") if isinstance(v := meta.get(k), str)}
    token = otel_context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        otel_context.detach(token)


@contextmanager
def enqueueing(name: str, queue: str, job_id: str) -> Iterator[None]:
    """Around an add. `trace_meta`, called inside, makes this span the parent of the execution."""
    if _off():
        yield
        return
    attributes = _attributes(name, queue, job_id, "send")
    with _tracer.start_as_current_span(
        f"send {name[:MAX_NAME]}",
        kind=SpanKind.PRODUCER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except Exception as error:
            _record(span, error)
            raise


@contextmanager
def executing(name: str, queue: str, job_id: str, attempt: int) -> Iterator[Span | None]:
    """Around one execution, inside the producer's context."""
    if _off():
        yield None
        return
    attributes: dict[str, str | int] = {**_attributes(name, queue, job_id, "process"), "job.attempt": attempt}
    with _tracer.start_as_current_span(
        f"process {name[:MAX_NAME]}",
        kind=SpanKind.CONSUMER,
        attributes=attributes,
        record_exception=False,  # would copy message and stack as they are
        set_status_on_exception=False,
    ) as span:
        yield span


def ended(span: Span | None, outcome: str, error: BaseException | None) -> None:
    """Say how the execution of `executing` ended."""
    if span is None:
        return
    span.set_attribute("job.outcome", str(outcome))
    if error is not None:
        _record(span, error, failed=str(outcome) not in _GOOD)


def to_file(path: Path, service: str) -> Any:
    """Configure the SDK to append finished spans to `path`, one JSON object per line; needs opentelemetry-sdk.

    Returns the provider; call its `shutdown()` at the end.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    def line(span: ReadableSpan) -> str:
        return f"{span.to_json(indent=None)}\n"

    path.parent.mkdir(parents=True, exist_ok=True)
    out = path.open("a", encoding="utf-8")  # appends of whole lines: several processes may share the file
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = ConsoleSpanExporter(out=out, formatter=line)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    return provider


def _attributes(name: str, queue: str, job_id: str, operation: str) -> dict[str, str]:
    return {
        "messaging.system": "bullmq",
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
        "messaging.message.id": job_id,
        "job.name": name[:MAX_NAME],
        "job.correlation_id": current_correlation_id(),
    }


def _record(span: Span, error: BaseException, *, failed: bool = True) -> None:
    message = redact_text(describe(error))[:1_000]
    span.add_event("exception", {"exception.type": type(error).__qualname__, "exception.message": message})
    if failed:
        span.set_status(Status(StatusCode.ERROR, message))

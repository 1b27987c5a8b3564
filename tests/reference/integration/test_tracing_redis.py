"""One trace across two processes: request, producer, worker, child job, with the right parents and no secrets."""

import json
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from harness.pipelines import JobSetup
from harness.waiting import until
from studyhall.patterns import tracing
from studyhall.patterns.core.errors import Snooze
from studyhall.patterns.flow import chain
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.tracing import trace_meta
from studyhall.patterns.typed_jobs import JobTypes, Payload

PROGRAM = Path(__file__).parent / "programs" / "traced.py"


def spans_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_producer_worker_and_child_job_in_two_processes_are_one_trace(redis_url, tmp_path, spawn, figures):
    store = f"sqlite:///{tmp_path / 'traced.db'}"
    worker = spawn(PROGRAM, "work", f"--redis={redis_url}", f"--store={store}", f"--spans={tmp_path / 'worker.jsonl'}")
    await worker.line("ready")
    producer = spawn(PROGRAM, "produce", f"--redis={redis_url}", f"--spans={tmp_path / 'producer.jsonl'}")
    assert await producer.exited(20) == 0
    await until(lambda: _receipts(tmp_path) == 2, 30, "the child job ran twice")
    worker.terminate()
    assert await worker.exited(20) == 0
    spans = spans_in(tmp_path / "producer.jsonl") + spans_in(tmp_path / "worker.jsonl")

    traces = {span["context"]["trace_id"] for span in spans}
    assert len(traces) == 1, "one trace"
    by_id = {span["context"]["span_id"]: span for span in spans}

    def path_to_root(span):
        names = [span["name"]]
        while span["parent_id"] is not None:
            span = by_id[span["parent_id"]]
            names.append(span["name"])
        return names

    receipts = sorted(_named(spans, "process receipt"), key=lambda span: span["attributes"]["job.attempt"])
    for receipt in receipts:
        assert path_to_root(receipt) == [
            "process receipt",
            "send receipt",
            "process order",
            "send order",
            "POST /orders",
        ]
    assert [(span["attributes"]["job.attempt"], span["attributes"]["job.outcome"]) for span in receipts] == [
        (1, "retry"),
        (2, "completed"),
    ], "one span per execution"
    [order] = _named(spans, "process order")
    assert order["kind"] == "SpanKind.CONSUMER"
    assert order["attributes"]["messaging.message.id"] == "order.k1"
    assert order["attributes"]["messaging.destination.name"] == "orders"
    assert order["attributes"]["job.correlation_id"] == receipts[0]["attributes"]["job.correlation_id"]
    [broken] = _named(spans, "process broken")
    assert broken["status"]["status_code"] == "ERROR"
    assert broken["events"][0]["attributes"]["exception.type"] == "Permanent"
    text = json.dumps(spans)
    assert "sk-live-4242" not in text, "errors are redacted"
    assert "ann@example.com" not in text, "and the payload is nowhere"
    services = {span["resource"]["attributes"]["service.name"] for span in spans}
    assert services == {"produce", "work"}
    figures(
        "tracing",
        name="one-trace",
        processes=len(services),
        spans=len(spans),
        traces=len(traces),
        levels=len(path_to_root(receipts[0])),
    )


def _receipts(folder):
    return len(_named(spans_in(folder / "worker.jsonl"), "process receipt"))


def _named(spans, name):
    return [span for span in spans if span["name"] == name]


class Nothing(Payload):
    pass


@pytest.fixture
def exported(monkeypatch):
    """An SDK for this test alone: the global one of a process can be set only once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    return exporter


async def test_the_jobs_of_a_flow_are_one_trace_and_waiting_is_no_error(redis_url, tmp_path, exported):
    snoozed = []

    async def handler(ctx, payload: Nothing):
        if ctx.name == "b" and not snoozed:
            snoozed.append(1)
            raise Snooze(0.01)

    jobs = JobTypes()
    for name in ("a", "b"):
        jobs.register(name=name, payload=Nothing, handler=handler, queue="q")
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup, setup.working():
        steps = [JobRequest(name, {}, key="k") for name in ("a", "b")]
        await setup.producer.enqueue(chain(*steps))
        await setup.ended(*steps)
        await until(lambda: len(exported.get_finished_spans()) == 4, what="four spans")
    spans = exported.get_finished_spans()
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    assert [span.name for span in spans] == ["send b", "process a", "process b", "process b"]
    assert all(span.status.status_code is not StatusCode.ERROR for span in spans), "snoozing is not an error"


async def test_an_add_that_fails_is_an_error_in_the_trace(tmp_path, exported):
    jobs = JobTypes()

    async def handler(ctx, payload: Nothing): ...

    jobs.register(name="a", payload=Nothing, handler=handler, queue="q")
    async with JobSetup.open("redis://127.0.0.1:1/0", tmp_path, jobs, timeout=1.0) as setup:
        with pytest.raises(Exception, match="same key"):
            await setup.producer.enqueue(JobRequest("a", {}, key="k"))
    [span] = exported.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]


def test_off_costs_a_few_microseconds_per_job_and_writes_nothing(figures):
    rounds = 20_000
    samples = []
    for _ in range(5):  # the least of five: its cost, without other load
        began = time.process_time()
        for _ in range(rounds):
            with tracing.enqueueing("a", "q", "a.1"):
                carrier = trace_meta()
            with tracing.executing("a", "q", "a.1", 1) as span:
                pass
            tracing.ended(span, "completed", None)
        samples.append((time.process_time() - began) / rounds * 1e6)
    assert (carrier, span) == ({}, None)
    assert min(samples) < 50, "a few microseconds; the limit is generous for slow machines"
    figures("tracing", name="off", microseconds_per_job=round(min(samples), 1))

"""Which queue, which broker: a table for each, from the runs (bench, fault suite, stacks). No figure is typed."""

import json
from typing import Any

from bench import results as read
from bench.figures import number
from guide import cards, stacks
from guide.charts import median_of
from queuesmith.catalogue import ROOT

REDIS = "Redis or Valkey"
# Peer of the benchmark -> its language, its server, and its stack in reference/stacks, if any.
QUEUES = {
    "queuesmith": ("Python", REDIS, ""),
    "queuesmith-bare": ("Python", REDIS, ""),
    "stock": ("Python", REDIS, ""),
    "node": ("Node", REDIS, "bullmq-ts"),
    "celery": ("Python", f"{REDIS}, RabbitMQ", "celery"),
    "dramatiq": ("Python", f"{REDIS}, RabbitMQ", ""),
    "taskiq": ("Python", f"{REDIS}, others", ""),
    "arq": ("Python", REDIS, ""),
    "saq": ("Python", f"{REDIS}, PostgreSQL", ""),
    "rq": ("Python", REDIS, ""),
    "huey": ("Python", f"{REDIS}, SQLite", ""),
    "asynq": ("Go", REDIS, "asynq"),
    # Not in the benchmark: under the faults only.
    "sqs": ("any", "AWS", "sqs"),
}
BROKERS = {
    "redis": ("Redis Streams", "one small server; history by length"),
    "nats": ("NATS JetStream", "one binary; history by age and size"),
    "rabbitmq": ("RabbitMQ", "Erlang; no history: what is read is gone"),
    "kafka": ("Kafka", "JVM; history for replay, order per partition"),
    "three-kafka": ("Kafka, three brokers", "three JVMs; the loss of one is no outage"),
}


def queues() -> str:
    bench = json.loads((ROOT / "bench" / "results.json").read_text())
    kills = median_of(bench, "kills", "queuesmith", "kills")
    lines = [
        f"| queue | no-op jobs/s | starts after (p50, p99) | worker | {kills} kills: lost / stuck / duplicated | "
        "semantics seen | a killed job again after, as set / default | "
        "breaks of the card, default → with modules | needs |",
        "|---|---:|---:|---:|---|---|---|---|---|",
    ]
    for ident, (language, server, stack) in QUEUES.items():
        known = ident in bench["peers"]
        title = bench["peers"][ident]["title"] if known else stacks.STACKS[stack]
        cells = [
            median_of(bench, "throughput", ident, "noop"),
            f"{median_of(bench, 'latency', ident, 'idle_p50')}, {median_of(bench, 'latency', ident, 'idle_p99')} ms",
            median_of(bench, "memory", ident, "pss", " MB"),
            " / ".join(median_of(bench, "kills", ident, key) for key in ("lost", "stuck", "duplicated")),
            _semantics(bench, ident),
            " / ".join(median_of(bench, "recovery", ident, key, " s") for key in ("lowered", "default")),
        ]
        if not known:
            cells = ["–"] * len(cells)
        lines.append(f"| {title} | {' | '.join(cells)} | {_breaks(stack)} | {language}, {server} |")
    return "\n".join(lines)


def _semantics(bench: dict[str, Any], ident: str) -> str:
    """What the kills showed, not what a manual says."""
    lost, stuck, twice = (read.median(bench, "kills", ident, key) or 0 for key in ("lost", "stuck", "duplicated"))
    if stuck:
        return "a crash leaves it stuck"
    if lost and not twice:
        return "at most once"
    return "at least once, with losses" if lost else "at least once" if twice else "effectively once"


def _breaks(stack: str) -> str:
    """How many faults of the card broke a promise, of those that hit."""
    results = stacks.results_of(stack) if stack else {}
    parts = []
    for twin in stacks.TWINS:
        rows = [results.get(twin, {}).get("rows", {}).get(name, [""])[0] for name in stacks.CARD]
        parts.append(f"{rows.count('broken')} of {sum(row in ('held', 'broken') for row in rows)}")
    return " → ".join(parts) if results else "–"


def brokers() -> str:
    lines = [
        "| broker | consumer kills: lost / duplicated / without inbox | seconds for all | "
        "broker kills: lost / delivered twice | needs, keeps |",
        "|---|---|---:|---|---|",
    ]
    kills = cards.measured("event-bus", (cards.COMMITTED,))
    for ident, (title, needs) in BROKERS.items():
        consumer = kills.get(f"consumer kills, {ident}", {}).get("figures", {})
        broker = kills.get(f"broker kills, {ident}", {}).get("figures", {})
        cells = [
            _joined(consumer, "lost", "duplicated", "duplicated_without_inbox"),
            _joined(consumer, "seconds"),
            _joined(broker, "lost", "delivered_twice"),
        ]
        lines.append(f"| {title} | {' | '.join(cells)} | {needs} |")
    return "\n".join(lines)


def _joined(figures: dict[str, Any], *keys: str) -> str:
    return " / ".join(number(figures[key]) if key in figures else "–" for key in keys)

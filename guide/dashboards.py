"""Prometheus alert rules and a Grafana dashboard, for StudyHall and every generated service: `templates/common/ops`.

Made by `make sync` from the metrics that the code declares (`health.exposition.GAUGES`, `JobMetrics`) and the limits of
StudyHall's own alerts. A rule about an undeclared metric is an error, and every metric has its panel.
"""

import json
import re
from functools import partial
from typing import Any

from queuesmith import catalogue
from studyhall.patterns.health.alerts import rule_for
from studyhall.patterns.health.exposition import GAUGES
from studyhall.patterns.observability.metrics import JobMetrics
from studyhall.watching import RULES

FOLDER = catalogue.ROOT / "templates" / "common" / "ops"
ALERTS, DASHBOARD = FOLDER / "alerts.yml", FOLDER / "dashboard.json"

# name, condition, how long it must hold, what to do. `limit(signal)`: where StudyHall's own alert is raised.
_RULES = [
    ("ServiceDown", "up == 0", "2m", "{{ $labels.instance }} cannot be scraped: is the process there?"),
    ("RedisDown", "redis_up == 0", "1m", "Redis does not answer {{ $labels.instance }}."),
    (
        "RedisNearlyFull",
        "redis_memory_ratio >= limit(redis.memory)",
        "5m",
        "Give it memory, or find what fills it: a full Redis takes no job.",
    ),
    (
        "JobsWaitTooLong",
        "queue_oldest_age_seconds >= limit(q.oldest)",
        "1m",
        "Add workers for {{ $labels.queue }}, or look for one that hangs.",
    ),
    (
        "NobodyWorks",
        "queue_unattended == 1",
        "1m",
        "Jobs are in {{ $labels.queue }} and no worker is connected: start one.",
    ),
    (
        "JobsFail",
        "queue_failure_ratio >= limit(q.failure_rate)",
        "5m",
        "Look at the dead letters of {{ $labels.queue }}.",
    ),
    ("DeadLettersWait", "dead_letters >= limit(dead_letters)", "5m", "Failed jobs wait for a person: dlq list."),
    (
        "EventsNotPublished",
        "outbox_oldest_seconds >= limit(outbox.oldest)",
        "1m",
        "Does a relay run, and does the broker answer?",
    ),
    (
        "EventsGivenUp",
        "outbox_quarantined > 0",
        "1m",
        "Events were refused: events quarantine. What stands behind them waits.",
    ),
    ("SagaStuck", "sagas_stuck > 0", "1m", "A saga waits for a person: saga list --state needs_repair."),
    (
        "WorkersDie",
        "max by (queue) (increase(queue_stalls[10m])) > 10",
        "1m",
        "Jobs of {{ $labels.queue }} lose their worker again and again.",
    ),
    (
        "CrashLoop",
        'sum by (queue) (increase(job_errors_total{error="CrashLoop"}[1h])) > 0',
        "0m",
        "A job of {{ $labels.queue }} killed every worker that ran it: see the dead letters.",
    ),
]


def alerts() -> str:
    lines = [
        "# Made by Queuesmith from the metrics in its code. Scrape /metrics of the API and the port of every worker,",
        "# then name this file in prometheus.yml: rule_files: [alerts.yml]",
        "groups:",
        "  - name: queues",
        "    rules:",
    ]
    for name, condition, lasting, advice in _RULES:
        expr = re.sub(r"limit\(([\w.]+)\)", lambda match: f"{_limit(match[1]):g}", condition)
        if unknown := set(re.findall(r"[a-z]+(?:_[a-z]+)+", expr)) - known():
            raise SystemExit(f"alert {name}: no code has {', '.join(sorted(unknown))}")
        lines += [
            f"      - alert: {name}",
            f"        expr: {json.dumps(expr)}",
            f"        for: {lasting}",
            "        annotations:",
            f"          summary: {json.dumps(advice)}",
        ]
    return "\n".join([*lines, ""])


def known() -> set[str]:
    """Their names in Prometheus."""
    return {*GAUGES, *(name for name, _, _ in _executions())}


def dashboard() -> str:
    panels: list[dict[str, Any]] = []
    for name, about in GAUGES.items():
        panels.append(_panel(len(panels), about, [(name, "{{queue}} {{state}}")], name))
    for name, about, kind in _executions():
        if kind == "histogram":
            spread = f"sum by (le, queue) (rate({name}_bucket[5m]))"
            targets = [(f"histogram_quantile({q}, {spread})", f"{{{{queue}}}} p{q * 100:g}") for q in (0.5, 0.99)]
        else:
            labels = {"jobs_total": "queue, outcome", "job_errors_total": "queue, error"}.get(name, "queue")
            of = f"rate({name}[5m])" if kind == "counter" else name
            legend = " ".join(f"{{{{{label}}}}}" for label in labels.split(", "))
            targets = [(f"sum by ({labels}) ({of})", legend)]
        panels.append(_panel(len(panels), about + (", per second" if kind == "counter" else ""), targets, name))
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    board = {
        "title": "Queues, events and their workers",
        "uid": "queuesmith",
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "timezone": "utc",
        "templating": {"list": [source]},
        "panels": panels,
    }
    # A panel per line: a change is readable, and the file stays small.
    small = partial(json.dumps, separators=(",", ":"))
    text = small({**board, "panels": []})
    return text.replace('"panels":[]', '"panels":[\n' + ",\n".join(map(small, panels)) + "\n]") + "\n"


def _panel(number: int, title: str, targets: list[tuple[str, str]], name: str) -> dict[str, Any]:
    unit = "s" if "seconds" in name else "percentunit" if name.endswith("_ratio") else "short"
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": number % 3 * 8, "y": number // 3 * 7, "w": 8, "h": 7},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": "AB"[i], "expr": expr, "legendFormat": legend} for i, (expr, legend) in enumerate(targets)
        ],
    }


def _executions() -> list[tuple[str, str, str]]:
    """Of every worker process: (name, help, type)."""
    families = JobMetrics().registry.collect()
    return [
        (f"{family.name}_total" if family.type == "counter" else family.name, family.documentation, family.type)
        for family in families
    ]


def _limit(signal: str) -> float:
    rule = rule_for(signal, RULES)
    if rule is None:
        raise SystemExit(f"StudyHall has no rule for {signal}")
    return rule.raise_at

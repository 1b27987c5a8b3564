"""The supported combinations: each is rendered, linted, typed, tested by its own tests and started.

Every kind, broker, database and Python version, the longest and the shortest names. In every test run all of them
are rendered, linted and typed, and those in QUICK are tested and started as well; `make faults` does it for all.
"""

from typing import Any

LONG = {
    "project_name": "abcdefghij-abcdefghij-abcdefghij-abcdefg",
    "package": "abcdefghij_abcdefghij_abcdefghij_abcdefg",
    "job": "abcdefghij-abcdefghij-abcdefgh",
    "event": "abcdefghijabcdefghij.abcdefghijabcdefghij",
    "fields": "abcdefghijabcdefghijabcdefghij: float, b: bool",
}
SHORT = {"package": "a", "job": "b", "event": "cc.dd", "fields": "e: int"}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "background-jobs": {},
    "background-jobs, a schedule, long names, PostgreSQL, 3.13": {
        "database": "postgres",
        "python_version": "3.13",
        "patterns": ["schedule"],
        **LONG,
    },
    "background-jobs, metrics, short names, nothing around": {
        "ci": "none",
        "container": False,
        "patterns": ["observability.metrics"],
        **SHORT,
    },
    "async-flow": {"kind": "async-flow"},
    "async-flow, long names, PostgreSQL, 3.12": {
        "kind": "async-flow",
        "database": "postgres",
        "python_version": "3.12",
        **LONG,
    },
    "async-flow, short names, further patterns": {"kind": "async-flow", "patterns": ["saga", "rate-limit"], **SHORT},
    "event-driven": {"kind": "event-driven"},
    "event-driven, RabbitMQ, long names, PostgreSQL": {
        "kind": "event-driven",
        "broker": "rabbitmq",
        "database": "postgres",
        **LONG,
    },
    "event-driven, NATS, short names, PostgreSQL": {
        "kind": "event-driven",
        "broker": "nats",
        "database": "postgres",
        **SHORT,
    },
    "event-driven, Kafka, 3.12": {"kind": "event-driven", "broker": "kafka", "python_version": "3.12"},
}
QUICK = {
    "background-jobs",
    "async-flow",
    "event-driven, RabbitMQ, long names, PostgreSQL",
    "event-driven, NATS, short names, PostgreSQL",
    "event-driven, Kafka, 3.12",
}

"""Measurements as Prometheus text, without its library.

Promise: a gauge has the same name and the same help wherever it is served; alert rules and dashboards are made from
`GAUGES`. A part that could not be read is missing from the text, never 0.
"""

from collections.abc import Iterable, Mapping

from .signals import Health

__all__ = ["GAUGES", "MEDIA_TYPE", "Sample", "exposition", "queue_samples"]

MEDIA_TYPE = "text/plain; version=0.0.4"
GAUGES = {
    "redis_up": "Redis answers",
    "redis_memory_ratio": "Share of its memory that Redis uses, of the machine's where it has no maxmemory",
    "queue_depth": "Jobs by state",
    "queue_oldest_age_seconds": "Age of the oldest job that should have started",
    "queue_failure_ratio": "Share of the jobs that ended lately which failed for good",
    "queue_stalls": "Jobs that lost the worker that ran them, since they are counted",
    "queue_workers": "Workers that are connected",
    "queue_unattended": "1: jobs are there and no worker is",
    "dead_letters": "Dead letters that were not replayed yet",
    "outbox_waiting": "Events that were not published yet",
    "outbox_oldest_seconds": "Age of the oldest of them",
    "outbox_quarantined": "Events that the relay gave up on",
    "sagas_stuck": "Sagas that wait for a person",
}
STATES = ("waiting", "prioritized", "delayed", "overdue", "waiting_children", "active", "failed")
Sample = tuple[str, Mapping[str, str], float]  # name, labels, value


def queue_samples(health: Health) -> list[Sample]:
    """Of `health.measure`."""
    samples: list[Sample] = [("dead_letters", {}, health.dead_letters)]
    if health.memory is not None:
        samples.append(("redis_memory_ratio", {}, health.memory))
    for queue in health.queues:
        labels = {"queue": queue.queue}
        samples += [("queue_depth", {**labels, "state": state}, getattr(queue, state)) for state in STATES]
        samples.append(("queue_oldest_age_seconds", labels, queue.oldest))
        samples.append(("queue_failure_ratio", labels, queue.failure_rate))
        samples.append(("queue_stalls", labels, queue.stalls))
        if queue.workers is not None:
            samples.append(("queue_workers", labels, queue.workers))
            samples.append(("queue_unattended", labels, queue.unattended))
    return samples


def exposition(samples: Iterable[Sample]) -> str:
    """The text for /metrics. Names are those of `GAUGES`."""
    by_name: dict[str, list[str]] = {}
    for name, labels, value in samples:
        if name not in GAUGES:
            raise ValueError(f"{name} is not in GAUGES: name it there, so that dashboards know it")
        pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        series = f"{name}{{{pairs}}}" if pairs else name
        by_name.setdefault(name, []).append(f"{series} {float(value)}")
    lines = []
    for name, values in by_name.items():
        lines += [f"# HELP {name} {GAUGES[name]}", f"# TYPE {name} gauge", *values]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

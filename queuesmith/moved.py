"""Modules of 0.1.0 that have moved since: from one flat folder to a core and packages."""

from collections.abc import Mapping
from pathlib import PurePosixPath

from . import catalogue
from .catalogue import MODULES
from .project import Project
from .record import Record, Refused, hash_of, module_name

MOVED = {
    "autopipeline.py": "bullmq_worker/autopipeline.py",
    "bullmq_ledger.py": "bullmq_worker/ledger.py",
    "bullmq_outcomes.py": "bullmq_worker/outcomes.py",
    "bullmq_worker.py": "bullmq_worker/worker.py",
    "bus_delivery.py": "event_bus/delivery.py",
    "bus_kafka.py": "event_bus/kafka.py",
    "bus_nats.py": "event_bus/nats.py",
    "bus_rabbitmq.py": "event_bus/rabbitmq.py",
    "bus_redis_streams.py": "event_bus/redis_streams.py",
    "connections.py": "core/connections.py",
    "dead_letter.py": "dead_letter/sweeper.py",
    "dead_letter_archive.py": "dead_letter/archive.py",
    "dead_letter_replay.py": "dead_letter/replayer.py",
    "deferred_reply.py": "deferred_reply/replies.py",
    "degraded.py": "degraded/producer.py",
    "engine.py": "engine/server.py",
    "engine_check.py": "engine/check.py",
    "engine_keeper.py": "engine/keeper.py",
    "errors.py": "core/errors.py",
    "event_bus.py": "event_bus/bus.py",
    "group_commit.py": "core/group_commit.py",
    "health.py": "health/signals.py",
    "health_alerts.py": "health/alerts.py",
    "idempotency.py": "idempotency/markers.py",
    "interaction_webhook.py": "deferred_reply/webhook.py",
    "isolated_child.py": "isolation/child.py",
    "isolation.py": "isolation/pool.py",
    "kafka_consumer.py": "event_bus/kafka_consumer.py",
    "lock_keeper.py": "bullmq_worker/locks.py",
    "observability.py": "observability/lines.py",
    "outbox.py": "outbox/table.py",
    "outbox_relay.py": "outbox/relay.py",
    "outbox_upkeep.py": "outbox/quarantine.py",
    "outbox_wakeup.py": "outbox/wakeup.py",
    "pending_jobs.py": "degraded/pending.py",
    "redaction.py": "core/redaction.py",
    "saga.py": "saga/runner.py",
    "saga_repair.py": "saga/repair.py",
    "saga_store.py": "saga/store.py",
    "schedule.py": "schedule/keeper.py",
    "schedule_slots.py": "schedule/slots.py",
    "store.py": "core/store.py",
    "stream_consumer.py": "event_bus/stream_consumer.py",
    "stream_scripts.py": "event_bus/stream_scripts.py",
    "worker_events.py": "bullmq_worker/events.py",
}


def new_import(old: str) -> str:
    """`errors.py` -> `core.errors`; `outbox.py` -> `outbox`, because the package offers what the module did."""
    new = PurePosixPath(MOVED[old])
    name = PurePosixPath(old).stem
    return name if new.parent.name == name else ".".join(new.with_suffix("").parts)


def moved_in(project: Project, files: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Files of this project whose module has moved upstream -> its old name."""
    old = {path: module_name(record["from"]) for path, record in files.items()}
    return {
        path: name
        for path, name in old.items()
        if name in MOVED and not (MODULES / name).is_file() and (project.root / path).is_file()
    }


def refuse_moved(project: Project, record: Record) -> None:
    """A mix of both layouts would not run, and moving files is not enough: imports change too."""
    entry = record.packages.get(project.into, {"patterns": [], "files": {}})
    moved = moved_in(project, entry["files"])
    if not moved:
        return
    edited = [
        path
        for path in moved
        if hash_of((project.root / path).read_text(encoding="utf-8", errors="replace"))
        != entry["files"][path]["sha256"]
    ]
    new = {MOVED[name] for name in moved.values()} | {PurePosixPath(path).name for path in entry["files"]}
    present = {pattern.id for pattern in catalogue.patterns().values() if pattern.own[0] in new}
    patterns = entry["patterns"] or sorted(present)
    imports = {name.removesuffix(".py"): new_import(name) for name in moved.values()}
    changed = {old: now for old, now in sorted(imports.items()) if old != now}
    lines = [
        f"{len(moved)} modules in {project.modules} have moved since {record.version}. Nothing was written.",
        "To bring the project over:",
        "",
        "1. Commit what you have." + (f" Edited here, carry it over afterwards: {', '.join(edited)}" if edited else ""),
        "2. Remove the old files; these come back in their new places:",
        *(f"     {path} -> {project.modules}/{MOVED[name]}" for path, name in moved.items()),
        f"3. queuesmith add {' '.join(patterns)} --into {project.into}",
        "4. Change the imports in your code, and the calls that CHANGELOG.md names:",
        *(f"     {project.package}.{old} -> {project.package}.{now}" for old, now in changed.items()),
    ]
    raise Refused("\n".join(lines))

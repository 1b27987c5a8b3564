"""Modules of 0.1.0 that lie elsewhere since: the patterns were one flat folder, now there are a core and packages."""

from __future__ import annotations

from pathlib import PurePosixPath

__all__ = ["MOVED", "new_import"]

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

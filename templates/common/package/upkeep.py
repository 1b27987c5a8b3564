{@% set jobs = kind != 'event-driven' %@}
"""What the service does for itself: it deletes what is too old, watches its health and sends alerts.

Any number of processes may do both at once: one incident is one alert.
"""

from __future__ import annotations

{@% if not jobs %@}
import asyncio
{@% endif %@}
import logging
{@% if jobs %@}
import time
{@% endif %@}
from typing import TYPE_CHECKING

{@% if not jobs %@}
from redis.exceptions import RedisError

{@% endif %@}
from .app import App
{@% if jobs %@}
from .patterns import dead_letter, health, idempotency
{@% else %@}
from .patterns import health, idempotency
{@% endif %@}
from .patterns.core.clock import Periodic
{@% if jobs %@}
from .patterns.core.errors import QueueUnavailable
{@% endif %@}
from .patterns.core.job import DAY
from .patterns.health.alerts import Alert, Rule, evaluate
from .patterns.health.exposition import Sample{@ ', queue_samples' if jobs @}
{@% if not jobs %@}
from .patterns.outbox import quarantine as outbox
from .patterns.saga import store as sagas
{@% endif %@}
from .settings import PREFIX, Settings, SettingsError

if TYPE_CHECKING:  # a command sends no alert
    from .patterns.health.senders import Sender

__all__ = ["RULES", "clean_up", "measured", "receivers", "upkeep", "watching"]

log = logging.getLogger(__name__)
{@% if jobs %@}
PATIENCE = 30.0  # seconds that a queue may be without a worker: a deployment is not an incident
# A replayed dead letter must still find the marker of its job.
{@% else %@}
# Events may be replayed while the outbox has them, so the markers of handled events outlive them.
{@% endif %@}
MARKERS_LONGER = 30 * DAY

# The signals that alert: `python -m {@ package @} health` shows all of them.
RULES = (
{@% if jobs %@}
    Rule("*.oldest", raise_at=300, clear_at=60, because="jobs wait too long: more workers, or one hangs"),
    Rule("*.unattended", raise_at=1, clear_at=0.5, because="jobs are there and no worker is: start one"),
    Rule("*.failure_rate", raise_at=0.2, clear_at=0.05, because="every fifth job fails: see dlq list"),
    Rule("dead_letters", raise_at=100, clear_at=20, because="failed jobs wait for a person: see dlq list"),
{@% else %@}
    Rule("outbox.oldest", raise_at=60, clear_at=10, because="events are not published: does a relay run?"),
    Rule("outbox.quarantined", raise_at=1, clear_at=0.5, because="given up: see events quarantine"),
    Rule("sagas.stuck", raise_at=1, clear_at=0.5, because="a saga waits for a person: see saga list"),
{@% endif %@}
    Rule("redis.down", raise_at=1, clear_at=0.5, because="Redis does not answer"),
    Rule("redis.memory", raise_at=0.8, clear_at=0.7, because="Redis is nearly full: see its maxmemory"),
)


def upkeep(app: App) -> list[Periodic]:
    """Run these beside the work."""

    async def forget() -> None:
        await clean_up(app)

    cleaning = Periodic("cleaning up", forget, every=app.settings.clean_up_seconds)
    return [cleaning, watching(app, receivers(app.settings))]


def watching(app: App, tell: Sender) -> Periodic:
    """In the API too: when no {@ 'worker' if jobs else 'relay' @} lives, only the API can tell."""
{@% if jobs %@}
    first_seen: dict[str, float] = {}
{@% endif %@}

    async def watch() -> None:
        _, signals = await measured(app)
{@% if jobs %@}
        for name in [name for name in signals if name.endswith(".unattended")]:
            if not signals[name]:
                first_seen.pop(name, None)
            elif time.monotonic() - first_seen.setdefault(name, time.monotonic()) < PATIENCE:
                signals[name] = 0.0
{@% endif %@}
        await evaluate(app.store, signals, RULES, tell)

    return Periodic("watching health", watch, every=app.settings.watch_seconds)


async def clean_up(app: App) -> dict[str, int]:
    """Delete what is older than KEPT_DAYS; returns the rows per table."""
    kept = app.settings.kept_days * DAY
{@% if jobs %@}
    return {
        "markers": await idempotency.purge(app.store, kept + MARKERS_LONGER),
        "dead_letters": await dead_letter.purge(app.store, kept),
    }
{@% else %@}
    gone = {"markers": await idempotency.purge(app.store, kept + MARKERS_LONGER), "events": 0, "sagas": 0}
    while batch := await outbox.purge(app.store, kept):  # short transactions, until nothing is left
        gone["events"] += batch
    while batch := await sagas.purge(app.store, kept):
        gone["sagas"] += batch
    return gone
{@% endif %@}


async def measured(app: App) -> tuple[list[Sample], dict[str, float]]:
    """For /metrics and RULES. A Redis that does not answer is a signal too."""
{@% if jobs %@}
    try:
        async with app.producer.bounded():
            letters = dead_letter.counts(app.store)
            report = await health.measure(app.producer.redis, app.jobs.queues, dead_letters=letters)
    except QueueUnavailable:
        return [("redis_up", {}, 0)], {"redis.down": 1.0}
    return [("redis_up", {}, 1), *queue_samples(report)], {"redis.down": 0.0, **report.signals()}
{@% else %@}
    lag = await outbox.lag(app.store)
    stuck = len(await sagas.list_sagas(app.store, state="needs_repair", limit=1_000))
    samples: list[Sample] = [
        ("outbox_waiting", {}, lag.waiting),
        ("outbox_oldest_seconds", {}, lag.oldest),
        ("outbox_quarantined", {}, lag.quarantined),
        ("sagas_stuck", {}, stuck),
    ]
    signals = {
        "outbox.oldest": lag.oldest,
        "outbox.quarantined": float(lag.quarantined),
        "sagas.stuck": float(stuck),
    }
    try:
        async with asyncio.timeout(2):
            memory = await health.memory_used(app.redis)
    except (RedisError, TimeoutError):
        return [("redis_up", {}, 0), *samples], {"redis.down": 1.0, **signals}
    if memory is not None:
        signals["redis.memory"] = memory
        samples.append(("redis_memory_ratio", {}, memory))
    return [("redis_up", {}, 1), *samples], {"redis.down": 0.0, **signals}
{@% endif %@}


def receivers(settings: Settings) -> Sender:
    """Who is told, besides the log. An error tracker is one more argument of `to_all`, like Sentry's, which
    `sentry_sdk.init(dsn=…)` has prepared: `tracker(lambda text: sentry_sdk.capture_message(text, "error"))`."""
    from .patterns.health.senders import sender, to_all

    named = [url.strip() for url in (settings.alert_urls or "").split(",") if url.strip()]
    try:
        return to_all(_note, *map(sender, named))
    except ValueError as error:
        raise SettingsError(f"{PREFIX}ALERT_URLS: {error}") from None


async def _note(alert: Alert) -> None:
    fields = {"signal": alert.signal, "value": round(alert.value, 3), "because": alert.because}
    if alert.raised:
        log.error("health alert", extra={"fields": fields})
    else:
        log.info("health alert cleared", extra={"fields": fields})

{@% set scheduled = 'schedule' in patterns %@}
{@% set metered = 'observability/metrics.py' in modules %@}
"""The worker process: takes jobs, archives those that failed for good, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from .app import App, open_app
{@% if scheduled %@}
from .jobs import schedules
{@% endif %@}
from .patterns import dead_letter
from .patterns.bullmq_worker import ReliableWorker
from .patterns.core.clock import Periodic
from .patterns.core.open_store import crowded
from .patterns.deadline import within_deadline
from .patterns.health import count_stalls
from .patterns.idempotency.once import inboxes, once
from .patterns.observability import WORKER, logged
{@% if metered %@}
from .patterns.observability.metrics import JobMetrics, measured, serve_metrics
{@% endif %@}
from .patterns.pipeline import Pipeline
{@% if kind == 'async-flow' %@}
from .patterns.progress import reporting
{@% endif %@}
{@% if scheduled %@}
from .patterns.schedule import ScheduleKeeper, signing_id, ticking
{@% endif %@}
from .patterns.shutdown import run_until_signalled
from .patterns.signed_payload import signed
from .patterns.stall_budget import QUEUE_LIMIT, crash_budget
from .patterns.typed_jobs import typed
from .settings import Settings
from .upkeep import upkeep

__all__ = ["work"]

log = logging.getLogger(__name__)


async def work(settings: Settings) -> None:
    """Run until SIGTERM. Start as many of these as you have cores."""
    async with open_app(settings) as app:
{@% if scheduled %@}
        recurring = schedules(app.jobs, app.signer)
{@% endif %@}
{@% if metered %@}
        metrics = JobMetrics()
        if settings.metrics_port:
            serve_metrics(metrics, settings.metrics_port, settings.metrics_host)
{@% endif %@}
        # Every job passes these steps, from the outside in. Drop some or add yours: see pipeline.py.
        pipeline = Pipeline(
            logged(),
{@% if metered %@}
            measured(metrics),
{@% endif %@}
            signed(app.signer{@ ', signing_id' if scheduled @}),
            typed(app.jobs),
            crash_budget(),
{@% if scheduled %@}
            ticking(recurring, app.store),
{@% endif %@}
            once(inboxes(app.store)),
            within_deadline(),
{@% if kind == 'async-flow' %@}
            reporting(),
{@% endif %@}
            services=settings,
        )
        workers = [
            ReliableWorker(
                queue,
                pipeline,
                url=app.redis.url,
                concurrency=settings.concurrency,
                lock_duration=settings.lock_seconds,
                stalled_interval=settings.stalled_seconds,
                max_stalled=QUEUE_LIMIT,
                name=WORKER,
            )
            for queue in app.jobs.queues
        ]
        for worker in workers:
            count_stalls(worker, app.producer.redis)
{@% if metered %@}
            metrics.count_stalls(worker)
{@% endif %@}
        beside = [
            Periodic("sweeping failed jobs", partial(sweep, app), every=settings.sweep_seconds),
            *upkeep(app),
{@% if scheduled %@}
            ScheduleKeeper(recurring, app.producer, app.store),
{@% endif %@}
        ]

        if advice := await crowded(app.store, settings.concurrency * len(workers)):
            log.warning(advice)

        async def ready() -> None:
            await asyncio.gather(*(worker.ready() for worker in workers))
            log.info("worker ready")

        await run_until_signalled([*workers, *beside], grace=settings.grace_seconds, on_ready=ready)


async def sweep(app: App) -> None:
    """Archive failed jobs as dead letters; any number of processes may do it."""
    await dead_letter.sweep(app.jobs.queues, app.producer.redis, app.store, alert=_alert)


async def _alert(letter: dead_letter.DeadLetter) -> None:
    """One line each; RULES in upkeep.py say when to wake somebody. After the fix: `dlq replay ID`."""
    fields = {"queue": letter.queue, "job_id": letter.job_id, "reason": letter.reason}
    log.error("dead letter", extra={"fields": fields})

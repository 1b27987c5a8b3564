"""The worker process: takes jobs, archives those that failed for good, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from .app import App, open_app
{@% if kind == 'background-jobs' %@}
from .jobs import schedules
{@% endif %@}
from .patterns import dead_letter, stall_budget
from .patterns.bullmq_worker import ReliableWorker
from .patterns.observability import JobMetrics, serve_metrics
from .patterns.pipeline import Pipeline
from .patterns.shutdown import run_until_signalled
from .settings import Settings

__all__ = ["work"]

log = logging.getLogger(__name__)


async def work(settings: Settings) -> None:
    """Run until SIGTERM. Start as many of these as you have cores."""
    async with open_app(settings) as app:
        metrics = JobMetrics()
        if settings.metrics_port:
            serve_metrics(metrics, settings.metrics_port, settings.metrics_host)
{@% if kind == 'background-jobs' %@}
        recurring = schedules(app.jobs)
        await recurring.apply(app.producer, app.store)
{@% endif %@}
        pipeline = Pipeline(
            app.jobs,
            app.store,
            signer=app.signer,
{@% if kind == 'background-jobs' %@}
            guards=[recurring.guard],
{@% endif %@}
            services=settings,
            metrics=metrics,
        )
        workers = [
            ReliableWorker(
                queue,
                pipeline,
                url=app.redis.url,
                concurrency=settings.concurrency,
                lock_duration=settings.lock_seconds,
                stalled_interval=settings.stalled_seconds,
                max_stalled=stall_budget.QUEUE_LIMIT,
            )
            for queue in app.jobs.queues
        ]

        async def ready() -> None:
            await asyncio.gather(*(worker.ready() for worker in workers))
            log.info("worker ready")

        await run_until_signalled([*workers, Sweeper(app)], grace=settings.grace_seconds, on_ready=ready)


class Sweeper:
    """Archives failed jobs as dead letters every few seconds; any number of them may run."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._stop = asyncio.Event()

    async def run(self) -> None:
        app = self._app
        while not self._stop.is_set():
            try:
                await dead_letter.sweep(app.jobs.queues, app.producer.redis, app.store, alert=_alert)
            except Exception:
                log.exception("sweeping the failed jobs did not work; trying again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(app.settings.sweep_seconds * random.uniform(0.8, 1.2)):
                    await self._stop.wait()

    async def drain(self, grace: float) -> list[str]:
        self._stop.set()
        return []


async def _alert(letter: dead_letter.DeadLetter) -> None:
    """Whom to wake. Replay it after the fix: `dead_letter.replay`."""
    fields = {"queue": letter.queue, "job_id": letter.job_id, "reason": letter.reason}
    log.error("dead letter", extra={"fields": fields})

"""`studyhall worker`: one process per core, each with a worker per queue; the parent restarts what dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import sys
from collections.abc import Sequence

from .app import App, open_app
from .limits import ai_limit, provider_breaker
from .patterns import stall_budget
from .patterns.bullmq_worker import ReliableWorker
from .patterns.cancel import CancelWatcher
from .patterns.dead_letter import sweeper as dead_letter
from .patterns.deferred_reply import DeferredReplies, InteractionWebhook
from .patterns.degraded.pending import Drainer
from .patterns.isolation import SubprocessPool
from .patterns.observability import JobMetrics, serve_metrics
from .patterns.pipeline import Pipeline
from .patterns.schedule import ScheduleKeeper
from .patterns.shutdown import Drainable, run_until_signalled
from .providers import GuardedProvider, open_provider
from .schedules import schedules
from .services import Chat, Services
from .settings import Settings
from .upkeep import Upkeep

__all__ = ["work", "worker_command"]

log = logging.getLogger("studyhall.worker")


async def work(settings: Settings, queues: Sequence[str] = ()) -> None:
    """Run one worker process until it is told to stop."""
    async with open_app(settings) as app, contextlib.AsyncExitStack() as stack:
        provider = open_provider(settings)
        stack.push_async_callback(provider.close)
        if breaker := provider_breaker(settings, app.producer.redis):
            provider = GuardedProvider(provider, breaker)
        pool = SubprocessPool(size=2)
        stack.push_async_callback(pool.close)
        webhook = InteractionWebhook(settings.chat_url)
        stack.push_async_callback(webhook.close)
        chat = Chat(DeferredReplies(app.store, life=settings.chat_token_seconds), webhook)
        upkeep = Upkeep(app.producer, app.store, app.jobs.queues)
        services = Services(provider, pool, settings.blob_dir, settings.max_document_bytes, upkeep, chat)
        scheduled = schedules(app.jobs, settings)
        metrics = JobMetrics()
        if settings.metrics_port:
            serve_metrics(metrics, settings.metrics_port)
        guards = [*ai_limit(settings, app.producer.redis), scheduled.guard]
        pipeline = Pipeline(
            app.jobs, app.store, signer=app.signer, guards=guards, services=services, metrics=metrics
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
            for queue in queues or app.jobs.queues
        ]

        async def ready() -> None:
            for worker in workers:
                await worker.ready()
            print(json.dumps({"event": "ready", "pid": os.getpid(), "redis": app.redis.url}), flush=True)

        beside: list[Drainable] = [
            Sweeper(app),
            Drainer(app.store, app.producer),
            CancelWatcher(app.producer.redis, workers),
            ScheduleKeeper(scheduled, app.producer, app.store),
        ]
        # What is there by now lives as long as the process: the collector need not walk it again and again, which
        # was a tenth of the cost of a small job.
        gc.freeze()
        await run_until_signalled([*workers, *beside], grace=settings.grace_seconds, on_ready=ready)


class Sweeper:
    """Archives failed jobs as dead letters every few seconds; any number of them may run."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._stop = asyncio.Event()

    async def run(self) -> None:
        every = self._app.settings.sweep_seconds
        while not self._stop.is_set():
            try:
                await dead_letter.sweep(
                    self._app.jobs.queues, self._app.producer.redis, self._app.store, alert=_alert
                )
            except Exception:
                log.exception("sweeping the failed jobs did not work; trying again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every * random.uniform(0.8, 1.2)):
                    await self._stop.wait()

    async def drain(self, grace: float) -> list[str]:
        self._stop.set()
        return []


async def _alert(letter: dead_letter.DeadLetter) -> None:
    log.error(
        "dead letter",
        extra={"fields": {"queue": letter.queue, "job_id": letter.job_id, "reason": letter.reason}},
    )


def worker_command(args: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "studyhall", "worker", "--processes", "1", *args]

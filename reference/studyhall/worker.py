"""`studyhall worker`: one process per core, each with a worker per queue; the parent restarts what dies."""

import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

from .app import App, open_app
from .limits import ai_limit, provider_breaker
from .maintenance import Maintenance, receivers
from .patterns import dead_letter
from .patterns.backpressure import max_age
from .patterns.bullmq_worker import ReliableWorker
from .patterns.cancel import CancelWatcher
from .patterns.checkpoint import checkpointed
from .patterns.claim_check import max_payload
from .patterns.core.clock import Periodic
from .patterns.core.open_store import crowded
from .patterns.deadline import within_deadline
from .patterns.deferred_reply import DeferredReplies, InteractionWebhook
from .patterns.degraded.pending import Drainer
from .patterns.engine.check import without_secrets
from .patterns.health import count_stalls
from .patterns.idempotency.once import inboxes, once
from .patterns.isolation import SubprocessPool
from .patterns.observability import WORKER, logged
from .patterns.observability.metrics import JobMetrics, measured, serve_metrics
from .patterns.pipeline import Pipeline
from .patterns.progress import reporting
from .patterns.schedule import ScheduleKeeper, signing_id, ticking
from .patterns.shutdown import Drainable, run_until_signalled
from .patterns.signed_payload import signed
from .patterns.stall_budget import QUEUE_LIMIT, crash_budget
from .patterns.store_gate import store_gate
from .patterns.tracing import traced
from .patterns.typed_jobs import typed
from .providers import GuardedProvider, open_provider
from .schedules import schedules
from .services import Chat, Services
from .settings import Settings

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
        tell = receivers(settings.alert_urls)
        maintenance = Maintenance(app.producer, app.store, app.jobs.queues, settings.blob_dir, tell)
        services = Services(provider, pool, settings.blob_dir, settings.max_document_bytes, maintenance, chat)
        scheduled = schedules(app.jobs, settings, app.signer)
        metrics = JobMetrics()
        if settings.metrics_port:
            serve_metrics(metrics, settings.metrics_port)
        # [pipeline]
        pipeline = Pipeline(
            logged(),
            measured(metrics),
            traced(),
            max_payload(),
            signed(app.signer, signing_id),
            typed(app.jobs),
            crash_budget(),
            max_age(),
            store_gate(),
            *ai_limit(settings, app.producer.redis),
            ticking(scheduled, app.store),
            once(inboxes(app.store)),
            within_deadline(),
            reporting(),
            checkpointed(app.store),
            services=services,
        )
        # [/pipeline]
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
            for queue in queues or app.jobs.queues
        ]
        for worker in workers:
            metrics.count_stalls(worker)
            count_stalls(worker, app.producer.redis)

        if advice := await crowded(app.store, settings.concurrency * len(workers)):
            log.warning(advice)

        async def ready() -> None:
            for worker in workers:
                await worker.ready()
            print(
                json.dumps({"event": "ready", "pid": os.getpid(), "redis": without_secrets(app.redis.url)}), flush=True
            )

        tell_every = min(2.0, settings.chat_token_seconds / 20)
        helpers: list[Drainable] = [
            Periodic("sweeping failed jobs", partial(sweep, app), every=settings.sweep_seconds),
            Drainer(app.store, app.producer),
            CancelWatcher(app.producer.redis, workers),
            ScheduleKeeper(scheduled, app.producer, app.store),
            Periodic("late chat answers", partial(chat.replies.tell_late, webhook), every=tell_every),
        ]
        # Objects that exist by now live as long as the process: the collector need not walk them again and again,
        # which was a tenth of the cost of a small job.
        gc.freeze()
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps what the imports have freed: 4 MB
            ctypes.CDLL(None).malloc_trim(0)
        await run_until_signalled([*workers, *helpers], grace=settings.grace_seconds, on_ready=ready)


async def sweep(app: App) -> None:
    """Archive failed jobs as dead letters; any number of processes may do it."""
    await dead_letter.sweep(app.jobs.queues, app.producer.redis, app.store, alert=_alert)


async def _alert(letter: dead_letter.DeadLetter) -> None:
    log.error(
        "dead letter", extra={"fields": {"queue": letter.queue, "job_id": letter.job_id, "reason": letter.reason}}
    )


def process_command(args: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "studyhall", "worker", "--processes", "1", *args]

"""`studyhall worker`: one process per core, each with a worker per queue; the parent restarts what dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .app import App, open_app
from .patterns import dead_letter, stall_budget
from .patterns.bullmq_worker import ReliableWorker
from .patterns.isolation import SubprocessPool
from .patterns.observability import JobMetrics, serve_metrics
from .patterns.pipeline import Pipeline
from .patterns.shutdown import Drainable, run_until_signalled
from .providers import open_provider
from .services import Services
from .settings import Settings

__all__ = ["supervise", "work"]

log = logging.getLogger("studyhall.worker")
UNUSABLE = 2  # exit code for "a restart will not help": wrong settings, no Redis to be had


async def work(settings: Settings, queues: Sequence[str] = ()) -> None:
    """Run one worker process until it is told to stop."""
    async with open_app(settings) as app, contextlib.AsyncExitStack() as stack:
        provider = open_provider(settings)
        stack.push_async_callback(provider.close)
        pool = SubprocessPool(size=2)
        stack.push_async_callback(pool.close)
        services = Services(provider, pool, settings.blob_dir, settings.max_document_bytes)
        metrics = JobMetrics()
        if settings.metrics_port:
            serve_metrics(metrics, settings.metrics_port)
        pipeline = Pipeline(app.jobs, app.store, signer=app.signer, services=services, metrics=metrics)
        workers: list[Drainable] = [
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
                if isinstance(worker, ReliableWorker):
                    await worker.ready()
            print(json.dumps({"event": "ready", "pid": os.getpid(), "redis": app.redis.url}), flush=True)

        await run_until_signalled([*workers, Sweeper(app)], grace=settings.grace_seconds, on_ready=ready)


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


@dataclass(slots=True)
class Child:
    process: asyncio.subprocess.Process
    started: float
    failures: int = 0


async def supervise(command: Sequence[str], count: int, grace: float) -> int:
    """Keep `count` processes of `command` running until SIGTERM; then stop them and report their exit."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    children: dict[int, asyncio.subprocess.Process] = {}

    def signalled() -> None:
        stop.set()
        for process in children.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)

    async def keep(slot: int) -> int:
        failures = 0
        while True:
            # Its own session: Ctrl-C in a terminal reaches us once, and we pass it on once.
            process = await asyncio.create_subprocess_exec(
                *command, "--parent", str(os.getpid()), start_new_session=True
            )
            children[slot] = process
            if stop.is_set():
                process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            code = await process.wait()
            del children[slot]
            if stop.is_set() or code in (0, UNUSABLE):
                stop.set()
                return code
            failures = 1 if time.monotonic() - began > 60 else failures + 1
            delay = random.random() * min(10.0, 0.2 * 2**failures)
            log.error("worker process died", extra={"fields": {"exit": code, "restart_in": round(delay, 2)}})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await stop.wait()

    async def reap() -> None:
        await stop.wait()
        signalled()
        await asyncio.sleep(grace + 10)
        for process in list(children.values()):
            log.error(
                "worker process did not stop in time, killing it", extra={"fields": {"pid": process.pid}}
            )
            process.kill()

    reaper = asyncio.create_task(reap())
    codes = await asyncio.gather(*(keep(slot) for slot in range(count)))
    reaper.cancel()
    return max(abs(code) for code in codes)


def worker_command(args: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "studyhall", "worker", "--processes", "1", *args]

"""SIGTERM ends a worker without hurting a job.

Promise: on the first signal the workers stop taking jobs, keep the locks of running ones, and let them finish
within `grace` seconds; what is still running then is cancelled and released to the queue at once; that
consumes no attempt and causes no stalled event. The exit code is 0. A second signal means: release now.

It does not hold for SIGKILL (the lock runs out, then the job is taken over) nor for work that blocks the event
loop, which nobody can interrupt: run that isolated. Give the platform more time than `grace` before it kills
(`stop_grace_period`, `terminationGracePeriodSeconds`).
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

__all__ = ["Drainable", "WorkerDied", "run_until_signalled"]

log = logging.getLogger("shutdown")


class Drainable(Protocol):
    """A worker that can be drained, such as `ReliableWorker`."""

    async def run(self) -> None: ...
    async def drain(self, grace: float) -> list[str]: ...


class WorkerDied(RuntimeError):
    """A worker's run loop ended although nobody asked it to. The process must end too, so that it is restarted."""


async def run_until_signalled(
    workers: Sequence[Drainable],
    *,
    grace: float,
    on_ready: Callable[[], Awaitable[object]] | None = None,
    stop: asyncio.Event | None = None,
) -> list[str]:
    """Run the workers until SIGTERM or SIGINT (or `stop`), drain them, return the ids that were released."""
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    tasks = [asyncio.create_task(worker.run(), name=f"worker-{i}") for i, worker in enumerate(workers)]
    try:
        if on_ready:
            await on_ready()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        # The stock worker's loop can end silently and leave a process that does nothing forever.
        died = [task for task in tasks if task.done()] if not stop.is_set() else []
        stop.set()
        log.info("draining", extra={"fields": {"grace": grace}})
        released = await _drain(workers, grace, hurry)
        stopping.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)
        if died:
            cause = died[0].exception() if not died[0].cancelled() else None
            raise WorkerDied(WorkerDied.__doc__) from cause
        return released
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _drain(workers: Sequence[Drainable], grace: float, hurry: asyncio.Event) -> list[str]:
    async def hurry_up() -> None:
        await hurry.wait()
        await asyncio.gather(*(worker.drain(0) for worker in workers))

    impatient = asyncio.create_task(hurry_up())
    try:
        released = await asyncio.gather(*(worker.drain(grace) for worker in workers))
    finally:
        impatient.cancel()
    return [ident for ids in released for ident in ids]

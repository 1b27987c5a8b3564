"""Background work in this process: tasks that are held, watched, limited and brought to an end.

Promise: a task started here is not collected before it ends (the event loop keeps only weak references: five of
five tasks without a strong one vanished), its error reaches the log, no more than `most` run at once, and `drain`
waits for them on shutdown, then cancels what is left and says which. For work that belongs to one request use
`asyncio.TaskGroup`, which ends before the request does.

It does NOT survive the process. kill -9, a crash or a deploy ends the work without a trace: what must happen
belongs in a queue. In-process is right for what nobody misses: warming a cache, a metric, telling listeners;
or for work whose rest stays visible elsewhere, such as replaying dead letters one by one.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from .core.errors import ResourceBusy

__all__ = ["Tasks", "TooManyTasks"]

log = logging.getLogger("tasks")


class TooManyTasks(ResourceBusy):
    """This process takes no more tasks now. Try again soon, or put this work into a queue."""


class Tasks:
    """One per process; `start` background work, `drain` at the end."""

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._running: set[asyncio.Task[Any]] = set()
        self._draining = False

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run it in the background. Await the returned task, or leave it."""
        if self._draining or len(self._running) >= self._most:
            work.close()  # or Python warns that it was never awaited
            why = "the process is stopping" if self._draining else f"{self._most} tasks run already"
            raise TooManyTasks(f"{name}: {why}. {TooManyTasks.__doc__}", retry_after=5.0)
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def drain(self, grace: float) -> list[str]:
        """Take no more, give running tasks `grace` seconds, cancel the rest; returns their names."""
        self._draining = True
        if self._running:
            await asyncio.wait(self._running, timeout=grace)
        rest = list(self._running)
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=5.0)
        return [task.get_name() for task in rest]

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %s", task.get_name(), type(error).__name__, exc_info=error)

"""A signal ends the workers in order, and a worker that ends by itself ends the process."""

import asyncio
import os
import signal

import pytest

from studyhall.patterns.shutdown import WorkerDied, run_until_signalled


class Worker:
    def __init__(self, *, dies: bool = False) -> None:
        self.graces, self._end, self._dies = list[float](), asyncio.Event(), dies

    async def run(self) -> None:
        if not self._dies:
            await self._end.wait()

    async def drain(self, grace: float) -> list[str]:
        self.graces.append(grace)
        self._end.set()
        return ["job-7"]


async def test_a_signal_drains_with_the_grace_and_tells_what_was_released():
    async def ready() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    worker = Worker()
    assert await run_until_signalled([worker], grace=3, on_ready=ready) == ["job-7"]
    assert worker.graces == [3]


async def test_a_worker_that_died_does_not_leave_a_process_that_does_nothing():
    with pytest.raises(WorkerDied):
        await run_until_signalled([Worker(dies=True), Worker()], grace=1)

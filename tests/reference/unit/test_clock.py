"""The one loop of this project: rounds that survive errors and end when told to."""

import asyncio
import time
from contextlib import asynccontextmanager

from harness.waiting import until
from studyhall.patterns.core.clock import Periodic


@asynccontextmanager
async def running(loop):
    task = asyncio.create_task(loop.run())
    try:
        yield task
    finally:
        loop.stop()
        await asyncio.wait_for(task, 5)


async def test_wake_brings_the_next_round_and_none_is_lost_that_came_during_one():
    rounds = 0
    loop: Periodic

    async def work():
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            loop.wake()

    loop = Periodic("work", work, every=600)
    async with running(loop):
        await until(lambda: rounds == 1, 5, "the first round")
        loop.wake()
        await until(lambda: rounds == 3, 5, "the round after the wake-up that came in the middle of one")


async def test_wake_does_not_cut_a_pause_short_that_the_work_or_an_error_asked_for():
    """A relay that its own commits wake up would call a bus that is away without any pause."""
    starts = []
    loop: Periodic

    async def work():
        starts.append(time.monotonic())
        loop.wake()
        if len(starts) == 1:
            return 0.3
        raise OSError("away")

    loop = Periodic("work", work, every=0.0, jitter=0.0, on_error=lambda _: 0.3)
    async with running(loop):
        await until(lambda: len(starts) == 3, 10, "three rounds")
    assert starts[1] - starts[0] > 0.25
    assert starts[2] - starts[1] > 0.25


async def test_a_cancellation_that_nobody_asked_for_does_not_end_it_and_a_real_one_does():
    rounds, errors = 0, list[BaseException]()

    async def work():
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise asyncio.CancelledError("of a library")

    loop = Periodic("work", work, every=0.01, on_error=errors.append)
    task = asyncio.create_task(loop.run())
    await until(lambda: rounds > 2, 5, "rounds after the stray cancellation")
    assert [type(error) for error in errors] == [asyncio.CancelledError]
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_a_task_group_that_fails_is_an_error_like_any_other():
    """Python before 3.13 leaves its task marked as cancelled: the loop ended with it."""
    rounds, errors = 0, list[BaseException]()

    async def breaks():
        raise ValueError

    async def work():
        nonlocal rounds
        rounds += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(breaks())

    async with running(Periodic("work", work, every=0.01, on_error=errors.append)):
        await until(lambda: rounds > 2, 5, "rounds after a task group that failed")
    assert {type(error) for error in errors} == {ExceptionGroup}


async def test_stop_lets_the_round_under_way_finish():
    entered, go_on, ended = asyncio.Event(), asyncio.Event(), False

    async def work():
        nonlocal ended
        entered.set()
        await go_on.wait()
        ended = True
        return True

    loop = Periodic("work", work, every=600)
    async with running(loop) as task:
        await asyncio.wait_for(entered.wait(), 5)
        assert await loop.drain(0) == []
        assert loop.stopping
        assert not task.done()
        go_on.set()
        await asyncio.wait_for(task, 5)
    assert ended

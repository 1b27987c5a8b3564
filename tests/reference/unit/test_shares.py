"""Files of one owner leave room for those of the others."""

import asyncio

import pytest

from harness.waiting import until
from studyhall.patterns.core.errors import ResourceBusy
from studyhall.services import Shares


async def test_an_owner_with_stuck_files_leaves_room_for_the_others():
    """Twenty stuck files of one owner: one is being read, nineteen go back into the queue, another owner reads."""
    shares, stuck, read = Shares(each=1, patience=0.05), asyncio.Event(), list[str]()

    async def file(owner, done=None):
        async with shares.of(owner):
            if done is not None:
                await done.wait()
            read.append(owner)

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        attack = [asyncio.create_task(file("mallory", stuck)) for _ in range(20)]
        tasks.create_task(file("ann"))
        await until(lambda: sum(task.done() for task in attack) >= 19, 20, "nineteen to go back")
        done, waiting = await asyncio.wait(attack, timeout=0)
        assert (len(done), len(waiting)) == (19, 1)
        assert all(isinstance(task.exception(), ResourceBusy) for task in done)
        assert read == ["ann"]
        stuck.set()
        await asyncio.wait(waiting)
    assert read == ["ann", "mallory"]
    assert not shares._turns, "nothing is kept of an owner without files"


async def test_honest_files_of_one_owner_wait_their_turn_and_are_all_read():
    shares = Shares(each=1, patience=10)
    most, now = 0, 0

    async def file():
        nonlocal most, now
        async with shares.of("ann"):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= 1

    await asyncio.gather(*(file() for _ in range(20)))
    assert most == 1


async def test_a_time_limit_inside_is_not_taken_for_a_busy_owner():
    with pytest.raises(TimeoutError):
        async with Shares().of("ann"):
            raise TimeoutError

"""Tasks beside a request: held, watched, limited, brought to an end."""

import asyncio
import gc
import logging

import pytest

from studyhall.patterns.in_process_tasks import Tasks, TooManyTasks


async def waits_for_a_reply(done, number):
    # Only the future refers to the task that awaits it, and only this coroutine to the future: a ring of garbage.
    reply = asyncio.get_running_loop().create_future()
    reply.add_done_callback(lambda _: None)
    await reply
    done.append(number)


async def test_a_task_without_a_reference_is_collected_and_ours_are_not(figures, caplog):
    caplog.set_level(logging.CRITICAL, "asyncio")  # "Task was destroyed but it is pending!"
    before = asyncio.all_tasks()
    gc.disable()  # a collection by chance took some before they were counted
    for number in range(5):
        asyncio.create_task(waits_for_a_reply([], number))  # what is usually written
    await asyncio.sleep(0)
    started = len(asyncio.all_tasks() - before)
    gc.enable()
    gc.collect()
    left = len(asyncio.all_tasks() - before)

    tasks = Tasks()
    for number in range(5):
        tasks.start(waits_for_a_reply([], number), name=f"held {number}")
    await asyncio.sleep(0)
    gc.collect()
    held = len(tasks)
    assert (started, left, held) == (5, 0, 5)
    assert sorted(await tasks.drain(0)) == [f"held {number}" for number in range(5)]
    lost = started - held
    figures("in-process-tasks", name="collected", started=started, naive_collected=started - left, collected=lost)


async def test_an_error_reaches_the_log_and_leaves_the_others_alone(caplog):
    async def fails():
        raise ValueError("broken")

    async def works():
        return "done"

    tasks = Tasks()
    tasks.start(fails(), name="the broken one")
    good = tasks.start(works(), name="the good one")
    assert await good == "done"
    await asyncio.sleep(0)
    assert "the broken one failed" in caplog.text
    assert len(tasks) == 0


async def test_no_more_than_so_many_at_once():
    tasks = Tasks(most=2)
    gate = asyncio.Event()
    for _ in range(2):
        tasks.start(_wait(gate), name="waits")
    with pytest.raises(TooManyTasks) as refused:
        tasks.start(_wait(gate), name="one more")
    assert refused.value.retry_after > 0
    gate.set()
    assert await tasks.drain(5) == []


async def test_shutdown_waits_then_cancels_and_says_what_it_left():
    tasks, gate, ended = Tasks(), asyncio.Event(), []

    async def quick():
        await asyncio.sleep(0.05)
        ended.append("quick")

    tasks.start(quick(), name="quick")
    hung = tasks.start(_wait(gate), name="hung")
    assert await tasks.drain(0.5) == ["hung"]
    assert ended == ["quick"]
    assert hung.cancelled()
    with pytest.raises(TooManyTasks, match="stopping"):
        tasks.start(_wait(gate), name="late")


async def test_a_task_group_ends_before_the_request_does():
    ended = []

    async def part(number):
        await asyncio.sleep(0.01 * number)
        ended.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(part(number))
    assert ended == [0, 1, 2]


async def _wait(gate):
    await gate.wait()

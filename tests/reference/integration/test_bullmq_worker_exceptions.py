"""Whatever a processor or a listener raises: the job ends visibly, and its neighbours run."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from harness.waiting import until
from harness.workers import at_work, counts, queue_at

PROGRAM = Path(__file__).parent / "programs" / "interrupted_worker.py"
EXITING = Path(__file__).parent / "programs" / "exiting_worker.py"


class PanicException(BaseException):
    """What a panic of Rust code is in Python (pyo3)."""


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


class PanicsWhenAsked(Exception):
    def __str__(self):
        raise PanicException


def cancelled_future():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


def raising(kind, *args):
    def call():
        raise kind(*args)

    return call


RAISED = {
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "interrupt": (raising(KeyboardInterrupt), "KeyboardInterrupt"),
    "panic": (raising(PanicException, "index out of bounds"), "PanicException: index out of bounds"),
    "generator": (raising(GeneratorExit), "GeneratorExit"),
    "group": (
        raising(BaseExceptionGroup, "two", [SystemExit(1), ValueError()]),
        "BaseExceptionGroup: two (2 sub-exceptions)",
    ),
    "wordless": (raising(Wordless), "Wordless"),
    "panics when asked": (raising(PanicsWhenAsked), "PanicsWhenAsked"),
    "stop": (raising(StopIteration), "coroutine raised StopIteration"),
    "cancelled future": (cancelled_future, "the processor let a CancelledError escape that nobody asked for"),
}


async def ended(queue, total):
    async def all_ended():
        now = await counts(queue)
        return now if now.get("completed", 0) + now.get("failed", 0) == total else {}

    return await until(all_ended, 30, f"{total} jobs to end")


@pytest.mark.parametrize("what", RAISED)
async def test_whatever_a_processor_raises_is_a_failed_attempt_and_its_neighbours_run(redis_url, what):
    """sys.exit() ended the loop, and every restarted worker's; a panic came back forever as stalled."""
    call, reason = RAISED[what]
    runs = []

    async def process(job, token):
        if job.name == "culprit":
            runs.append(job.attemptsMade)
            await asyncio.sleep(0)
            call()

    async with queue_at(redis_url, "q") as queue:
        culprit = await queue.add("culprit", {}, {"attempts": 2})
        await queue.addBulk([{"name": "neighbour", "data": {}} for _ in range(10)])
        async with at_work("q", process, url=redis_url, concurrency=2) as worker:
            assert await ended(queue, 11) == {"completed": 10, "failed": 1}
            failed = await queue.getJob(culprit.id)
            assert not worker.active
    assert runs == [0, 1]
    assert (failed.attemptsMade, failed.failedReason) == (2, reason)
    assert len(failed.stacktrace) == 2


async def breaks():
    raise ValueError("in a child")


async def in_a_task_group():
    async with asyncio.TaskGroup() as group:
        group.create_task(breaks())


async def cancels_itself():
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("raises", [in_a_task_group, cancels_itself])
async def test_a_task_group_that_fails_is_a_failed_attempt_and_no_crash(redis_url, raises):
    """Python before 3.13 leaves the task marked as cancelled. It was taken for the end of the event loop: the job came
    back as stalled forever, and no attempt was counted."""
    async with queue_at(redis_url, "q") as queue:
        job = await queue.add("culprit", {}, {"attempts": 2})
        async with at_work("q", processor_of(raises), url=redis_url):
            assert await ended(queue, 1) == {"failed": 1}
            failed = await queue.getJob(job.id)
    assert (failed.attemptsMade, failed.stalledCounter) == (2, 0)


def processor_of(raises):
    async def process(job, token):
        await raises()

    return process


@pytest.mark.parametrize(("name", "signals"), [("waits", 1), ("blocks", 2)])
async def test_a_real_ctrl_c_still_stops_the_process_and_releases_the_job(redis_url, spawn, name, signals):
    """Two for a processor that blocks: asyncio turns the first into a cancellation, which it does not see, and the
    second hits the processor: one attempt."""
    async with queue_at(redis_url, "q") as queue:
        job = await queue.add(name, {}, {"attempts": 2})
        worker = spawn(PROGRAM, redis_url)
        await worker.line("started")
        for _ in range(signals):
            worker.signal(signal.SIGINT)
            await asyncio.sleep(0.2)  # two at once would be one
        assert await worker.exited(20) != 0
        assert await counts(queue) == ({"delayed": 1} if name == "waits" else {"waiting": 1})
        assert (await queue.getJob(job.id)).attemptsMade == signals - 1


@pytest.mark.parametrize("name", ["group", "gather", "forgotten"])
async def test_sys_exit_in_a_task_of_the_processor_is_a_crash_that_a_budget_ends(redis_url, spawn, name):
    """It was released for free with its neighbours, and ended every next worker as well."""
    async with queue_at(redis_url, "q") as queue:
        culprit = await queue.add(name, {}, {"attempts": 2})
        await queue.addBulk([{"name": "neighbour", "data": {}} for _ in range(10)])

        async def ended():
            return await counts(queue) == {"completed": 10, "failed": 1}

        for _ in range(6):
            worker = spawn(EXITING, redis_url)
            await until(lambda worker=worker: worker.returncode is not None or ended(), 30, "an exit, or the end")
            if worker.returncode is None:
                break
        assert await ended(), await counts(queue)
        assert (await queue.getJob(culprit.id)).failedReason


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("what", ["sys.exit", "interrupt", "panic", "generator", "wordless", "cancelled future"])
async def test_nothing_that_a_listener_raises_touches_a_job(redis_url, what, kind):
    """A CancelledError out of `.result()` of a cancelled future: 20 jobs failed, none of them had run."""
    call, _ = RAISED[what]
    runs = []
    heard = set()

    def listener(event):
        def sync(*args):
            heard.add(event)
            call()

        async def later(*args):
            heard.add(event)
            await asyncio.sleep(0)
            call()

        return sync if kind == "sync" else later

    async def process(job, token):
        runs.append(job.id)
        if job.name == "fails":
            raise ValueError("once")

    events = ("active", "completed", "failed", "error", "on_error")
    async with queue_at(redis_url, "q") as queue:
        await queue.addBulk([{"name": "works", "data": {}} for _ in range(19)])
        await queue.add("fails", {})
        async with at_work("q", process, url=redis_url, concurrency=3, on_error=listener("on_error")) as worker:
            for event in events[:-1]:
                worker.on(event, listener(event))
            await queue.addBulk([{"name": "works", "data": {}} for _ in range(20)])
            await queue.add("fails", {})
            assert await ended(queue, 41) == {"completed": 39, "failed": 2}
            await until(lambda: heard == set(events), 10, lambda: f"all to be heard, not {heard}")
    assert sorted(runs, key=int) == [str(number) for number in range(1, 42)]

"""Isolation with real deaths: a process killer takes only itself down, and nothing is left behind."""

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import pytest_asyncio

from harness.processes import alive
from harness.waiting import until
from studyhall.patterns.core.errors import Transient
from studyhall.patterns.deadline import DeadlineExceeded, run_within
from studyhall.patterns.isolation import ProcessDied, SubprocessPool
from studyhall.patterns.isolation.child import HEADER

PROGRAMS = Path(__file__).parent / "programs"
LOCK_DURATION = 2.0  # seconds; a worker whose loop is blocked for that long loses its job to another


@pytest.fixture
def work(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import isolated_work

    return isolated_work


@pytest_asyncio.fixture
async def pool():
    async with SubprocessPool(5) as pool:
        yield pool


async def _longest_block(busy):
    """The longest time that the event loop was deaf while `busy` ran."""
    longest = 0.0

    async def tick():
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - before - 0.01)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    await busy()
    await asyncio.sleep(0.02)
    ticking.cancel()
    return longest


@pytest.mark.slow
async def test_event_loop_stays_free_during_cpu_bound_work_that_blocks_it_past_the_lock_inline(pool, work, figures):
    seconds = LOCK_DURATION + 0.5

    async def inline():
        work.compute(seconds)

    naive = await _longest_block(inline)
    isolated = await _longest_block(lambda: pool.run(work.compute, seconds))
    assert naive > LOCK_DURATION, "the naive twin misses its lock renewals: the job runs twice"
    assert isolated < LOCK_DURATION / 4
    figures(
        "isolation",
        name="event loop",
        lock_seconds=LOCK_DURATION,
        longest_block_inline_s=round(naive, 2),
        longest_block_isolated_s=round(isolated, 3),
    )


@pytest.mark.fault
async def test_process_killer_takes_only_itself_down_where_an_executor_fails_its_neighbours(
    pool, work, tmp_path, figures
):
    gate, naive_gate = tmp_path / "gate", tmp_path / "naive-gate"

    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(5, multiprocessing.get_context("spawn")) as executor:
        neighbours = [loop.run_in_executor(executor, work.neighbour, str(naive_gate), number) for number in range(4)]
        killer = loop.run_in_executor(executor, work.die, "sigkill")
        # CPython 3.11 may not watch the process it started last until one more call comes in: without this
        # one the executor can wait for the dead process forever.
        neighbours.append(loop.run_in_executor(executor, work.neighbour, str(naive_gate), 4))
        with pytest.raises(BrokenProcessPool):
            await killer
        naive = await asyncio.gather(*neighbours, return_exceptions=True)
        with pytest.raises(BrokenProcessPool):  # and it never recovers
            await loop.run_in_executor(executor, work.add, 1, 1)
    assert all(isinstance(result, BrokenProcessPool) for result in naive), "five innocent calls failed with it"

    ours = [asyncio.create_task(pool.run(work.neighbour, str(gate), number)) for number in range(4)]
    with pytest.raises(ProcessDied, match="the process running die died: SIGKILL") as caught:
        await pool.run(work.die, "sigkill")
    assert caught.value.exit_code == -9
    assert not any(task.done() for task in ours)
    gate.touch()
    results = await asyncio.gather(*ours, return_exceptions=True)
    assert results == [0, 1, 2, 3]
    assert await pool.run(work.add, 1, 1) == 2, "the dead child is replaced"
    figures(
        "isolation",
        name="process killer",
        neighbours=len(naive),
        failed_in_executor=sum(isinstance(result, BrokenProcessPool) for result in naive),
        failed_in_pool=sum(isinstance(result, Exception) for result in results),
    )


@pytest.mark.fault
@pytest.mark.parametrize(
    ("how", "reason"),
    [("sigkill", "SIGKILL"), ("os._exit", "exit code 3"), ("sys.exit", "exit code 4"), ("segfault", "SIGSEGV")],
)
async def test_every_way_to_die_is_named_and_retried(pool, work, how, reason):
    with pytest.raises(ProcessDied, match=reason) as caught:
        await pool.run(work.die, how)
    assert isinstance(caught.value, Transient)


@pytest.mark.fault
async def test_memory_limit_stops_only_the_hungry_call(pool, work):
    assert await pool.run(work.allocate, 600) == 600 << 20, "it would have fitted without the limit"
    hungry = pool.run(work.allocate, 600, memory_limit=400 << 20)
    modest = pool.run(work.allocate, 20, memory_limit=400 << 20)
    first, second = await asyncio.gather(hungry, modest, return_exceptions=True)
    assert isinstance(first, ProcessDied)
    assert "over its memory limit of 400 MB" in str(first)
    assert second == 20 << 20
    assert await pool.run(work.allocate, 600) == 600 << 20, "the limit ends with the call"


@pytest.mark.fault
async def test_timeout_kills_an_endless_loop(pool, work, tmp_path):
    mark = tmp_path / "pid"
    with pytest.raises(DeadlineExceeded, match="its process was killed"):
        await pool.run(work.spin_forever, str(mark), timeout=2)
    assert not alive(int(mark.read_text()))
    assert await pool.run(work.add, 1, 1) == 2


@pytest.mark.fault
async def test_a_deadline_or_cancellation_around_the_call_kills_the_process_and_its_children(pool, work, tmp_path):
    mark = tmp_path / "grandchild"
    with pytest.raises(DeadlineExceeded):
        await run_within(3, lambda: pool.run(work.start_a_grandchild_and_hang, str(mark)))
    await until(lambda: not alive(int(mark.read_text())), what="the grandchild is dead")

    spinning = tmp_path / "spinning"
    call = asyncio.create_task(pool.run(work.spin_forever, str(spinning)))
    await until(lambda: spinning.exists() and spinning.read_text(), what="the call has started")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not alive(int(spinning.read_text())), what="the cancelled process is dead")


@pytest.mark.fault
async def test_a_child_that_died_while_idle_is_not_given_to_the_next_call(pool, work):
    victim = await pool.run(work.pid)
    os.kill(victim, signal.SIGKILL)
    await until(lambda: not alive(victim), what="the idle child is dead")
    await until(lambda: not any(child.alive for child in pool._idle), what="the pool has noticed")
    assert await pool.run(work.pid) != victim


@pytest.mark.fault
async def test_closing_the_pool_leaves_no_process(work, tmp_path):
    mark = tmp_path / "busy"
    pool = SubprocessPool(3)
    idle = await pool.run(work.pid)
    busy = asyncio.create_task(pool.run(work.spin_forever, str(mark)))
    await until(lambda: mark.exists() and mark.read_text(), what="a busy child")
    await pool.close()
    with pytest.raises(ProcessDied, match="the pool was closed meanwhile"):
        await busy
    assert not alive(idle)
    assert not alive(int(mark.read_text()))


@pytest.mark.fault
async def test_sigkill_of_the_parent_leaves_no_child(spawn, tmp_path):
    owner = spawn(PROGRAMS / "pool_owner.py", str(tmp_path / "mark"))
    line = await owner.line("children")
    children = [int(pid) for pid in line.split()[1:]]
    assert len(set(children)) == 2
    assert all(alive(pid) for pid in children)
    owner.kill()
    await until(lambda: not any(alive(pid) for pid in children), what="busy and idle children died with it")


@pytest.mark.fault
async def test_without_the_kernels_help_a_busy_child_still_ends_with_its_parents_pipe(work, tmp_path):
    """Other systems have no PDEATHSIG. There, the end of the pipe is what tells a child."""
    boot = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
        "from studyhall.patterns.isolation.child import serve; sys.platform = 'elsewhere'; serve(int(sys.argv[2]))"
    )
    mark = tmp_path / "mark"
    argv = [sys.executable, "-c", boot, json.dumps(sys.path), str(os.getpid())]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        request = pickle.dumps((work.__name__, "spin_forever", (str(mark),), None))
        child.stdin.write(HEADER.pack(len(request)) + request)
        child.stdin.flush()
        try:
            await until(lambda: mark.exists() and mark.read_text(), what="the child computes")
            child.stdin.close()
            await until(lambda: child.poll() is not None, what="the child has ended by itself")
        finally:
            child.kill()
    assert child.returncode == 0

"""The one loop that is fine inside a process."""

import asyncio

import pytest

from studyhall.patterns.timers import every


async def test_runs_never_overlap_and_an_error_does_not_end_the_loop(caplog):
    stop, running, most, runs = asyncio.Event(), 0, 0, 0

    async def work():
        nonlocal running, most, runs
        running += 1
        most = max(most, running)
        runs += 1
        try:
            await asyncio.sleep(0.03)  # longer than the pause
            if runs == 2:
                raise ValueError("once")
            if runs == 5:
                stop.set()
        finally:
            running -= 1

    async with asyncio.timeout(10):
        await every(0.01, work, stop=stop)
    assert (runs, most) == (5, 1)
    assert "ValueError" in caplog.text


async def test_a_hung_run_is_ended_by_its_limit_and_a_set_stop_ends_the_pause():
    stop, started = asyncio.Event(), 0

    async def hangs():
        nonlocal started
        started += 1
        if started == 3:
            stop.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await every(0.01, hangs, stop=stop, limit=0.05)
    assert started == 3
    with pytest.raises(ValueError, match="pause above 0"):
        await every(0, hangs)

"""The work is stopped, not only no longer waited for."""

import asyncio

import pytest

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.job import Deadline
from studyhall.patterns.deadline import DeadlineExceeded, run_within


async def test_work_that_hangs_is_stopped_and_does_nothing_afterwards():
    charges: list[str] = []

    async def hang() -> None:
        await asyncio.sleep(0.2)
        charges.append("too late")

    with pytest.raises(DeadlineExceeded):
        await run_within(0.01, hang)
    await asyncio.sleep(0.3)
    assert charges == []


async def test_work_in_time_returns_its_result_and_its_own_errors():
    async def answer(number: int) -> int:
        if number < 0:
            raise Permanent("negative")
        return number

    assert await run_within(5, answer, 42) == 42
    with pytest.raises(Permanent, match="negative"):
        await run_within(5, answer, -1)


def test_later_attempts_may_take_longer():
    assert [Deadline(2, growth=2, longest=5).limit_for(attempt) for attempt in (1, 2, 3)] == [2, 4, 5]

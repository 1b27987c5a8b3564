"""A crash of the worker costs the job nothing, until it is the job that kills workers."""

from types import SimpleNamespace
from typing import Any

import pytest

from studyhall.patterns.stall_budget import CrashLoop, crash_budget


async def test_a_job_is_given_up_after_its_crash_budget_and_not_before():
    async def work(run: Any) -> str:
        return "done"

    step = crash_budget(3)
    for crashes in range(4):
        assert await step(SimpleNamespace(job=SimpleNamespace(stalledCounter=crashes)), work) == "done"
    with pytest.raises(CrashLoop, match="died 4 times"):
        await step(SimpleNamespace(job=SimpleNamespace(stalledCounter=4)), work)

"""Every execution passes the steps in their order and ends in one outcome; a wrong order is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from studyhall.patterns.core.errors import FailPermanently, Permanent
from studyhall.patterns.core.execution import CallNext, JobContext, gives
from studyhall.patterns.pipeline import Pipeline, WrongOrder


@gives("payload")
async def reads(run: JobContext, call_next: CallNext) -> Any:
    run.payload, run.handler = run.job.data, work
    return await call_next(run)


async def work(ctx: JobContext, payload: Any) -> str:
    if payload == "poison":
        raise Permanent("no use")
    return f"did {payload}"


def job(data: Any) -> Any:
    return SimpleNamespace(
        id="7",
        name="do",
        data=data,
        opts={},
        attemptsMade=0,
        attemptsStarted=1,
        stalledCounter=0,
        timestamp=0,
        processedOn=None,
        delay=0,
        queue=SimpleNamespace(name="work"),
    )


async def test_steps_run_from_the_outside_in_and_a_permanent_error_ends_the_job():
    seen: list[str] = []

    async def outer(run: JobContext, call_next: CallNext) -> Any:
        seen.append("before")
        try:
            return await call_next(run)
        finally:
            seen.append(str(run.outcome or "still open"))

    pipeline = Pipeline(outer, reads)
    assert await pipeline(job("this"), "token") == "did this"
    with pytest.raises(FailPermanently, match="no use"):
        await pipeline(job("poison"), "token")
    assert seen[::2] == ["before", "before"]


def test_a_pipeline_that_reads_no_job_is_refused_with_the_fix():
    with pytest.raises(WrongOrder, match="typed"):
        Pipeline()

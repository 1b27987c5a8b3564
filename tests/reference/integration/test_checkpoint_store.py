"""Checkpoints and their fence on both databases."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from studyhall.patterns import checkpoint
from studyhall.patterns.checkpoint import CheckpointTooLarge, Overtaken
from studyhall.patterns.core.execution import JobContext
from studyhall.patterns.core.job import Decision, Outcome
from studyhall.patterns.core.store import begin


async def save(store, key, state, run):
    async with begin(store) as tx:
        await checkpoint.save(tx, key, state, run)


async def test_an_earlier_run_can_neither_save_nor_close_nor_begin(store):
    await save(store, "k", {"next": 100}, 1)
    assert await checkpoint.claim(store, "k", 2) == {"next": 100}
    with pytest.raises(Overtaken):
        await save(store, "k", {"next": 200}, 1)
    with pytest.raises(Overtaken):
        async with begin(store) as tx:
            await checkpoint.close(tx, "k", 1)
    with pytest.raises(Overtaken):
        await checkpoint.claim(store, "k", 1)
    assert await checkpoint.claim(store, "k", 2) == {"next": 100}


async def test_a_run_that_wakes_up_after_the_work_was_finished_cannot_save(store):
    await checkpoint.claim(store, "k", 2)
    async with begin(store) as tx:
        await checkpoint.close(tx, "k", 2)
    with pytest.raises(Overtaken):
        await save(store, "k", {"next": 1}, 1)


async def test_a_refused_save_rolls_the_rows_of_its_batch_back(store):
    await checkpoint.claim(store, "k", 2)

    async def stale_batch():
        async with begin(store) as tx:
            await checkpoint.save(tx, "a row of the batch", 1, 1)
            await checkpoint.save(tx, "k", {"next": 1}, 1)

    with pytest.raises(Overtaken):
        await stale_batch()
    assert await checkpoint.claim(store, "a row of the batch", 2) is None


async def test_of_many_runs_that_save_at_once_the_latest_wins(store):
    results = await asyncio.gather(
        *(save(store, "k", {"run": run}, run) for run in range(1, 21)), return_exceptions=True
    )
    assert {type(result) for result in results} <= {type(None), Overtaken}
    assert await checkpoint.claim(store, "k", 21) == {"run": 20}


def fence(created_ms, starts):
    job = SimpleNamespace(timestamp=created_ms, attemptsStarted=starts)
    return JobContext(job, "", None, lambda run, error: Decision(Outcome.RETRY, "")).fence


def test_every_start_has_a_higher_fence_and_so_has_a_replayed_job():
    created = int(time.time() * 1000)
    assert fence(created, 1) < fence(created, 2) < fence(created + 1, 1)
    assert fence(created, 10**9) < fence(created + 1, 1)
    assert fence(created * 10, 99_999) < 2**63, "fits a bigint for the next two thousand years"


async def test_a_state_that_carries_the_work_is_refused(store):
    with pytest.raises(CheckpointTooLarge, match="save a position"):
        await save(store, "k", "x" * 1_000_001, 1)

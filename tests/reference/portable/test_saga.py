"""All effects happen, or those that did are taken back in reverse."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.saga import Saga, SagaRunner, SagaStep, StepContext


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


async def run(store: AsyncEngine, card: str) -> tuple[str, list[str]]:
    """(how the saga ended, what the outside systems were asked)"""
    calls: list[str] = []

    async def call(ctx: StepContext) -> dict[str, str]:
        calls.append(ctx.step)
        if ctx.step == "charge" and ctx.data["card"] == "expired":
            raise Permanent("card refused")
        return {}

    async def undo(ctx: StepContext) -> None:
        calls.append(f"undo {ctx.step}")

    saga = Saga("order", [SagaStep(name, call, undo) for name in ("reserve", "charge", "ship")])
    runner = SagaRunner(store, saga)
    async with begin(store) as tx:
        assert await runner.start(tx, "order", f"order-{card}", {"card": card})
    async with begin(store) as tx:
        assert not await runner.start(tx, "order", f"order-{card}", {"card": card}), "one id is one saga"
    return (await runner.run(f"order-{card}")).state, calls


async def test_every_step_is_done_once(store: AsyncEngine):
    assert await run(store, "valid") == ("completed", ["reserve", "charge", "ship"])


async def test_a_refusal_takes_back_what_was_started_in_reverse(store: AsyncEngine):
    state, calls = await run(store, "expired")
    assert calls == ["reserve", "charge", "undo charge", "undo reserve"]
    assert state == "compensated"

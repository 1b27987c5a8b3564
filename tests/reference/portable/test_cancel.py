"""A cancelled job has no effect, and one that was done is not cancelled: the first marker wins."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from studyhall.patterns.cancel import rule_out
from studyhall.patterns.core.job import cancelled
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.idempotency import Inbox, fingerprint


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


async def test_the_first_of_cancellation_and_effect_wins(store: AsyncEngine):
    effects: list[str] = []

    async def effect(tx: AsyncConnection) -> str:
        effects.append("done")
        return "done"

    inbox, mark = Inbox(store, "mail"), fingerprint({"to": "ann"})
    first = await rule_out(store, "mails", "mail", "1", "order-1", {"to": "ann"}, "the customer left")
    assert first.state == "cancelled"
    assert cancelled(await inbox.once("order-1", mark, effect)) == "the customer left"
    assert await inbox.once("order-2", mark, effect) == "done"
    late = await rule_out(store, "mails", "mail", "2", "order-2", {"to": "ann"}, "too late")
    assert late.state == "too-late"
    assert effects == ["done"]

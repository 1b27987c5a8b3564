"""The same request twice is one request, with one answer."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.idempotency import KeyReused
from studyhall.patterns.request_dedup import RequestDedup


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


async def test_a_repeat_gets_the_first_answer_and_another_body_is_refused(store: AsyncEngine):
    uploads = RequestDedup(store, "upload")
    made: list[str] = []

    async def work(ident: str) -> dict[str, str]:
        made.append(ident)
        return {"id": ident}

    first = await uploads.run("ann", "key-1", {"sha256": "abc"}, work)
    again = await uploads.run("ann", "key-1", {"sha256": "abc"}, work)
    assert (again.value, again.replayed, len(made)) == (first.value, True, 1)
    with pytest.raises(KeyReused):
        await uploads.run("ann", "key-1", {"sha256": "other"}, work)
    assert not (await uploads.run("bob", "key-1", {"sha256": "abc"}, work)).replayed


async def test_a_request_that_failed_may_be_tried_again(store: AsyncEngine):
    uploads = RequestDedup(store, "upload")

    async def fails(ident: str) -> None:
        raise RuntimeError("disk full")

    async def works(ident: str) -> str:
        return "done"

    with pytest.raises(RuntimeError):
        await uploads.run("ann", "key-2", {}, fails)
    assert (await uploads.run("ann", "key-2", {}, works)).value == "done"

"""A transaction commits as a whole or leaves nothing, and a reader cannot write."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import Column, String, Table, insert, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, metadata, read


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


notes = Table("portable_notes", metadata, Column("text", String(20), primary_key=True))


async def texts(store: AsyncEngine) -> list[str]:
    async with read(store) as tx:
        return list(await tx.scalars(select(notes.c.text).order_by(notes.c.text)))


async def test_all_or_nothing(store: AsyncEngine):
    async with begin(store) as tx:
        await tx.execute(insert(notes).values(text="kept"))

    async def rolled_back() -> None:
        async with begin(store) as tx:
            await tx.execute(insert(notes).values(text="lost"))
            raise RuntimeError("changed my mind")

    with pytest.raises(RuntimeError):
        await rolled_back()
    assert await texts(store) == ["kept"]


async def test_many_writers_lose_no_update(store: AsyncEngine):
    async def write(number: int) -> None:
        async with begin(store) as tx:
            await tx.execute(insert(notes).values(text=f"{number:02}"))

    await asyncio.gather(*(write(number) for number in range(20)))
    assert len(await texts(store)) == 20


async def test_a_reader_that_writes_is_an_error(store: AsyncEngine):
    with pytest.raises(DBAPIError):
        async with read(store) as tx:
            await tx.execute(insert(notes).values(text="smuggled"))

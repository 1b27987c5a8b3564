"""A run goes on where the last one was; an earlier one that wakes up cannot save."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.checkpoint import Overtaken, claim, save
from studyhall.patterns.checkpoint import close as finish
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await create_all(opened)
    yield opened
    await close(opened)


async def test_the_next_run_starts_from_the_last_state_and_the_one_before_is_refused(store: AsyncEngine):
    assert await claim(store, "import-7", 1) is None
    async with begin(store) as tx:
        await save(tx, "import-7", {"row": 100}, 1)
    assert await claim(store, "import-7", 2) == {"row": 100}
    with pytest.raises(Overtaken):
        async with begin(store) as tx:
            await save(tx, "import-7", {"row": 50}, 1)
    async with begin(store) as tx:
        await save(tx, "import-7", {"row": 200}, 2)
        await finish(tx, "import-7", 2)
    assert await claim(store, "import-7", 3) is None

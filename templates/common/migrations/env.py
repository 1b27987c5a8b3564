"""How Alembic finds the tables of this service and its database: that of the settings, as for the service itself."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection

# What the processes import is what declares their tables.
from {@ package @} import api, commands, {@ 'relay' if kind == 'event-driven' else 'worker' @}  # noqa: F401
from {@ package @}.patterns.core.open_store import close, open_store
from {@ package @}.patterns.core.store import begin, metadata
from {@ package @}.settings import environment, load


def migrate(connection: Connection) -> None:
    # SQLite changes a column by making the table again: batch.
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    context.run_migrations()


async def main() -> None:
    store = open_store(load(environment()).store_url)
    try:
        async with begin(store) as tx:  # all revisions or none
            await tx.run_sync(migrate)
    finally:
        await close(store)


asyncio.run(main())

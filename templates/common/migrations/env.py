"""How Alembic finds the tables of this service and its database: from the settings, like the service."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection

# These import every module that declares a table.
from {@ package @} import api, commands, {@ 'relay' if kind == 'event-driven' else 'worker' @}  # noqa: F401
from {@ package @}.patterns.core.open_store import close, open_store
from {@ package @}.patterns.core.store import begin, metadata
from {@ package @}.settings import environment, load


def migrate(connection: Connection) -> None:
    # Batch: SQLite changes a column by recreating the table.
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

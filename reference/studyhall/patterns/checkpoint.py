"""Long work resumes where it was, not at the start.

Promise: after a crash the next run starts from the last saved state, so at most one batch per crash is done
again. The state and the rows it stands for can be saved in one transaction, then nothing is done twice.

It does not hold for effects outside the database that happen between two checkpoints: give those a provider
idempotency key per batch.
"""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import Column, Float, String, Table, Text, delete, select
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .errors import Permanent
from .store import metadata, read

__all__ = ["CheckpointTooLarge", "checkpoints", "clear", "load", "save"]

MAX_BYTES = 1_000_000

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("key", String(300), primary_key=True),
    Column("state", Text, nullable=False),
    Column("saved_at", Float, nullable=False),
)


class CheckpointTooLarge(Permanent):
    """A checkpoint says where the work is; it does not carry the work. Store the results, save a position."""


async def save(tx: AsyncConnection, key: str, state: Any) -> None:
    """Remember `state` (JSON) for `key`, in the caller's transaction."""
    text = json.dumps(state, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise CheckpointTooLarge(f"{len(text)} bytes: {CheckpointTooLarge.__doc__}")
    insert = pg_insert if tx.dialect.name == "postgresql" else sqlite_insert
    statement = insert(checkpoints).values(key=key, state=text, saved_at=time.time())
    await tx.execute(
        statement.on_conflict_do_update(
            index_elements=["key"],
            set_={"state": statement.excluded.state, "saved_at": statement.excluded.saved_at},
        )
    )


async def load(engine: AsyncEngine, key: str) -> Any | None:
    """The last state saved for `key`, or None."""
    async with read(engine) as connection:
        text = await connection.scalar(select(checkpoints.c.state).where(checkpoints.c.key == key))
    return None if text is None else json.loads(text)


async def clear(tx: AsyncConnection, key: str) -> None:
    """Forget the state, in the transaction that records the end of the work."""
    await tx.execute(delete(checkpoints).where(checkpoints.c.key == key))

"""Long work resumes where it stopped, not at the start.

Promise: after a crash the next run starts from the last saved state, so at most one batch per crash is
repeated. The state and its rows can be saved in one transaction; then no row is written twice, not even by a run
that was frozen, replaced and then woke up: every run has a number (`fence`), and a save with a number below the
latest is refused (`Overtaken`).

It does not hold for effects outside the database that happen between two checkpoints: give those a provider
idempotency key per batch. A job that is enqueued again under its old key, instead of replayed, starts from the
beginning.
"""

import json
import time
from typing import Any

from sqlalchemy import BigInteger, Column, Float, Table, Text, delete
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .core.execution import CallNext, JobContext, Step, needs
from .core.failures import Permanent, Transient
from .core.job import Save
from .core.store import begin, insert, metadata

__all__ = ["CheckpointTooLarge", "Overtaken", "checkpointed", "checkpoints", "claim", "close", "purge", "save"]

MAX_BYTES = 1_000_000

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("key", Text, primary_key=True),
    Column("state", Text),  # JSON; NULL: nothing to resume, the row only remembers the fence
    Column("fence", BigInteger, nullable=False),
    Column("saved_at", Float, nullable=False),
)


class CheckpointTooLarge(Permanent):
    """A checkpoint says where the work is; it does not carry the work. Store the results, save a position."""


class Overtaken(Transient):
    """A later run of this job has begun: this one lost its lock, and what it did since is thrown away."""


def checkpointed(store: AsyncEngine) -> Step:
    """Gives handlers `ctx.checkpointed`, where an earlier run was, and `ctx.checkpoint`, to say where this one is."""

    @needs("payload")
    async def checkpointed(run: JobContext, call_next: CallNext) -> Any:
        run.store = store
        touched = run.job.attemptsStarted != 1  # a first start has nothing to resume, and nobody to shut out
        if touched:
            run.checkpointed = await claim(store, run.scope, run.fence)

        async def remember(state: Any, effect: Save | None) -> None:
            nonlocal touched
            async with begin(store) as tx:
                if effect:
                    await effect(tx)
                await save(tx, run.scope, state, run.fence)
            run.checkpointed, touched = state, True

        run._checkpoint = remember
        answer = await call_next(run)
        if touched and run.transactional:
            run.saves.append(lambda tx: close(tx, run.scope, run.fence))
        elif touched:
            async with begin(store) as tx:
                await close(tx, run.scope, run.fence)
        return answer

    return checkpointed


async def claim(store: AsyncEngine, key: str, fence: int) -> Any | None:
    """Begin a run: the last state saved for `key`, or None; from now on earlier runs cannot save."""
    async with begin(store) as tx:
        row = (await tx.execute(_upsert(tx, key, fence).returning(checkpoints.c.state))).first()
    if row is None:
        raise Overtaken(Overtaken.__doc__)
    return None if row.state is None else json.loads(row.state)


async def save(tx: AsyncConnection, key: str, state: Any, fence: int) -> None:
    """Remember `state` (JSON) for `key`, in the caller's transaction; `Overtaken` rolls that back."""
    text = json.dumps(state, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise CheckpointTooLarge(f"{len(text)} bytes: {CheckpointTooLarge.__doc__}")
    await _write(tx, key, fence, text)


async def close(tx: AsyncConnection, key: str, fence: int) -> None:
    """Forget the state, in the transaction that records the end of the work. The fence stays until `purge`."""
    await _write(tx, key, fence, None)


async def purge(store: AsyncEngine, older_than: float) -> int:
    """Drop rows older than that many seconds: states of jobs that are gone, fences of runs that ended."""
    async with begin(store) as tx:
        aged = checkpoints.c.saved_at < time.time() - older_than
        return (await tx.execute(delete(checkpoints).where(aged))).rowcount


async def _write(tx: AsyncConnection, key: str, fence: int, text: str | None) -> None:
    written = await tx.execute(_upsert(tx, key, fence, state=text).returning(checkpoints.c.key))
    if written.first() is None:
        raise Overtaken(Overtaken.__doc__)


def _upsert(tx: AsyncConnection, key: str, fence: int, **state: str | None) -> Any:
    values = {"fence": fence, "saved_at": time.time(), **state}
    return (
        insert(tx, checkpoints)
        .values(key=key, **values)
        .on_conflict_do_update(index_elements=["key"], set_=values, where=checkpoints.c.fence <= fence)
    )

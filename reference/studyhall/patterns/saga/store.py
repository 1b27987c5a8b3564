"""Where sagas live: three tables, one lease per saga, one way to write.

Promises
- Two processes never both write to one saga: every write carries the fence number its lease was given, and a
  write with an old number is refused (`SagaLeaseLost`), however long its process was paused.
- Every change of state leaves a row in `saga_history`, in the transaction that made the change.

When they do not hold
- The lease ends by the wall clock. Where clocks differ by more than the lease, a second process takes over
  early: the fence still refuses the first one's writes, but the outside call it is in runs twice, and only
  the provider key makes that one effect.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    String,
    Table,
    Text,
    bindparam,
    delete,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.errors import Permanent, clean_text
from ..core.redaction import redact_text
from ..core.store import begin, in_one_hop, insert, metadata, read

__all__ = [
    # rows
    "HistoryRow",
    "SagaLease",
    "SagaLeaseLost",
    "SagaConflict",
    "SagaRow",
    "StepRow",
    "UnknownSaga",
    # reading and writing
    "claim",
    "create",
    "history",
    "list_sagas",
    "load",
    "purge",
    "record",
    "redact",
]

sagas = Table(
    "saga",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("name", String(100), nullable=False),
    Column("state", String(20), nullable=False),  # running completed compensating compensated needs_repair
    Column("backward", Boolean, nullable=False, default=False),  # once True, never forward again
    Column("data", JSON, nullable=False),
    Column("error", Text),
    Column("owner", String(200)),
    Column("fence", Integer, nullable=False, default=0),
    # When somebody may pick it up: the end of the lease while it is held, the next try while it waits, NULL
    # when there is nothing to do. One small partial index finds all due work, however many sagas have ended.
    Column("due_at", Double),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)
Index(
    "saga_due",
    sagas.c.due_at,
    sqlite_where=sagas.c.due_at.is_not(None),
    postgresql_where=sagas.c.due_at.is_not(None),
)
Index("saga_state", sagas.c.state, sagas.c.updated_at)
steps = Table(
    "saga_step",
    metadata,
    Column("saga_id", String(200), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("name", String(100), nullable=False),
    Column("state", String(20), nullable=False, default="pending"),  # pending started done undoing undone
    Column("attempts", Integer, nullable=False, default=0),
    Column("undo_attempts", Integer, nullable=False, default=0),
    Column("since", Double),  # first try in the present direction
    Column("result", JSON(none_as_null=True)),  # NULL until it is known that the step took effect
)
saga_history = Table(
    "saga_history",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("saga_id", String(200), nullable=False, index=True),
    Column("at", Double, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("step", String(100)),
    Column("event", String(40), nullable=False),
    Column("detail", Text),
)


class SagaLeaseLost(Exception):
    """Another process holds this saga now. Drop the work: nothing was written, and the other one goes on."""


class SagaConflict(Permanent):
    """A saga with this id exists with another name or other data. Use one id per business request."""


class UnknownSaga(Permanent):
    """No saga has this id. `list_sagas` shows the ones there are."""


@dataclass(frozen=True)
class StepRow:
    name: str
    position: int
    state: str
    attempts: int
    undo_attempts: int
    since: float | None
    result: dict[str, Any] | None


@dataclass(frozen=True)
class SagaRow:
    id: str
    name: str
    state: str
    backward: bool
    data: dict[str, Any]
    error: str | None
    owner: str | None
    fence: int
    due_at: float | None
    created_at: float
    updated_at: float
    steps: tuple[StepRow, ...] = ()


@dataclass(frozen=True)
class HistoryRow:
    at: float
    actor: str
    step: str | None
    event: str
    detail: str | None


@dataclass(frozen=True)
class SagaLease:
    """The right to drive one saga until the lease ends or somebody with a higher fence takes over."""

    store: AsyncEngine
    saga_id: str
    owner: str
    fence: int

    @asynccontextmanager
    async def write(self, **changes: Any) -> AsyncIterator[AsyncConnection]:
        """A transaction that proves first, with a row lock, that this lease is still the newest."""
        async with begin(self.store) as tx:
            await tx.run_sync(self._prove, changes)
            yield tx

    async def set_step(
        self, tx: AsyncConnection, row: StepRow, event: str, detail: str = "", **values: Any
    ) -> None:
        await tx.run_sync(self._note, row.name, event, detail, row.position, values)

    async def note(
        self,
        row: StepRow | None,
        event: str | None,
        detail: str = "",
        *,
        step: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """`write` and `set_step` in one go, where nothing of the caller's belongs in the transaction."""

        def write(tx: Connection) -> None:
            self._prove(tx, changes)
            name, position = (row.name, row.position) if row else (None, 0)
            self._note(tx, name, event, detail, position, step or {})

        await in_one_hop(self.store, write, write=True)

    def _prove(self, tx: Connection, changes: Mapping[str, Any]) -> None:
        given = {"updated_at": time.time(), **changes}
        if tx.execute(_held(*given), {"_id": self.saga_id, "_fence": self.fence, **given}).rowcount != 1:
            raise SagaLeaseLost(f"saga {self.saga_id}: fence {self.fence} is old. {SagaLeaseLost.__doc__}")

    def _note(
        self,
        tx: Connection,
        name: str | None,
        event: str | None,
        detail: str,
        position: int,
        values: Mapping[str, Any],
    ) -> None:
        if values:
            tx.execute(_step(*values), {"_saga": self.saga_id, "_position": position, **values})
        if event:
            tx.execute(_NOTE, _history_row(self.saga_id, self.owner, event, name, detail))


# Built once: making a statement costs more than sending it.
_NOTE = saga_history.insert()


@cache
def _held(*names: str) -> Any:
    this = (sagas.c.id == bindparam("_id"), sagas.c.fence == bindparam("_fence"))
    return update(sagas).where(*this).values({name: bindparam(name) for name in names})


@cache
def _step(*names: str) -> Any:
    this = (steps.c.saga_id == bindparam("_saga"), steps.c.position == bindparam("_position"))
    return update(steps).where(*this).values({name: bindparam(name) for name in names})


async def create(
    tx: AsyncConnection, saga_id: str, name: str, data: Mapping[str, Any], made: Mapping[str, bool]
) -> bool:
    """Insert the saga in the caller's transaction; `made`: its steps, True for those that are done with it.

    False: it is there already, the same.
    """
    now, plain = time.time(), json.loads(json.dumps(dict(data), allow_nan=False))
    row = {"id": saga_id, "name": name, "state": "running", "data": plain, "due_at": now}
    # On PostgreSQL the second of two callers waits in this statement for the first one's commit.
    fresh = insert(tx, sagas).values(**row, created_at=now, updated_at=now)
    # RETURNING, because an INSERT's rowcount is -1 with psycopg.
    if (await tx.execute(fresh.on_conflict_do_nothing().returning(sagas.c.id))).first() is None:
        known = (await tx.execute(select(sagas.c.name, sagas.c.data).where(sagas.c.id == saga_id))).one()
        if known.name != name or known.data != plain:
            raise SagaConflict(f"saga {saga_id}: {SagaConflict.__doc__}")
        return False
    rows: list[dict[str, Any]] = [
        {
            "saga_id": saga_id,
            "position": position,
            "name": step,
            "state": "done" if done else "pending",
            "result": {} if done else None,
        }
        for position, (step, done) in enumerate(made.items())
    ]
    await tx.execute(steps.insert(), rows)
    begun = [step for step, done in made.items() if done]
    told = [
        _history_row(saga_id, "caller", "created"),
        *(_history_row(saga_id, "caller", "done", s) for s in begun),
    ]
    await tx.execute(_NOTE, told)
    return True


async def claim(
    store: AsyncEngine,
    *,
    owner: str,
    names: Collection[str],
    seconds: float,
    limit: int,
    saga_id: str | None = None,
) -> list[SagaLease]:
    """Take due sagas, oldest first, of those `names` only: definitions this process has."""
    now = time.time()
    due = select(sagas.c.id, sagas.c.owner, sagas.c.fence).where(
        sagas.c.due_at <= now, sagas.c.name.in_(names)
    )
    if saga_id is not None:
        due = due.where(sagas.c.id == saga_id)
    due = due.order_by(sagas.c.due_at).limit(limit)

    def look(tx: Connection) -> bool:
        return tx.execute(due).first() is not None

    def take(tx: Connection) -> list[SagaLease]:
        taken = []
        for row in tx.execute(due.with_for_update(skip_locked=True)).all():
            lease = SagaLease(store, row.id, owner, row.fence + 1)
            held = {"owner": owner, "fence": lease.fence, "due_at": now + seconds}
            tx.execute(_held(*held), {"_id": row.id, "_fence": row.fence, **held})
            if row.owner is not None:
                why = f"lease of {row.owner} ended"
                tx.execute(_NOTE, _history_row(row.id, owner, "taken over", None, why))
            taken.append(lease)
        return taken

    # An idle loop must not take SQLite's one write lock each time it looks.
    if not await in_one_hop(store, look, write=False):
        return []
    return await in_one_hop(store, take, write=True)


async def load(store: AsyncEngine, saga_id: str) -> SagaRow:
    def look(tx: Connection) -> SagaRow:
        saga = tx.execute(_SAGA, {"_id": saga_id}).mappings().first()
        if saga is None:
            raise UnknownSaga(f"{saga_id}: {UnknownSaga.__doc__}")
        rows = tx.execute(_STEPS, {"_id": saga_id}).mappings()
        return SagaRow(**saga, steps=tuple(StepRow(**row) for row in rows))

    return await in_one_hop(store, look, write=False)


_SAGA = select(sagas).where(sagas.c.id == bindparam("_id"))
_STEPS = (
    select(*(steps.c[field.name] for field in fields(StepRow)))
    .where(steps.c.saga_id == bindparam("_id"))
    .order_by(steps.c.position)
)


async def list_sagas(store: AsyncEngine, *, state: str | None = None, limit: int = 100) -> list[SagaRow]:
    """Newest change first, without their steps. `state="needs_repair"` is the list for a human."""
    query = select(sagas).order_by(sagas.c.updated_at.desc()).limit(limit)
    if state is not None:
        query = query.where(sagas.c.state == state)
    async with read(store) as tx:
        return [SagaRow(**row) for row in (await tx.execute(query)).mappings()]


async def history(store: AsyncEngine, saga_id: str) -> list[HistoryRow]:
    """The saga's timeline, oldest first."""
    columns = [saga_history.c[name] for name in ("at", "actor", "step", "event", "detail")]
    query = select(*columns).where(saga_history.c.saga_id == saga_id).order_by(saga_history.c.id)
    async with read(store) as tx:
        return [HistoryRow(**row) for row in (await tx.execute(query)).mappings()]


async def purge(store: AsyncEngine, older_than: float, *, batch: int = 500) -> int:
    """Forget up to `batch` sagas that ended more than `older_than` seconds ago. Call again while it is full."""
    ended = (sagas.c.state.in_(("completed", "compensated")), sagas.c.updated_at < time.time() - older_than)
    async with begin(store) as tx:
        old = (await tx.scalars(select(sagas.c.id).where(*ended).limit(batch))).all()
        for column in (saga_history.c.saga_id, steps.c.saga_id, sagas.c.id):
            await tx.execute(delete(column.table).where(column.in_(old)))
    return len(old)


async def record(
    tx: AsyncConnection, saga_id: str, actor: str, event: str, *, step: str | None = None, detail: str = ""
) -> None:
    await tx.execute(_NOTE, _history_row(saga_id, actor, event, step, detail))


def _history_row(
    saga_id: str, actor: str, event: str, step: str | None = None, detail: str = ""
) -> dict[str, Any]:
    return {
        "saga_id": saga_id,
        "at": time.time(),
        "actor": clean_text(actor, 200),
        "step": step,
        "event": event,
        "detail": redact(detail) or None,
    }


def redact(text: str, limit: int = 1000) -> str:
    """A provider's error text likes to repeat what it was sent: an e-mail address, a card number, a token."""
    return clean_text(redact_text(text), limit)

"""Where sagas live: three tables, one lease per saga, one way to write.

Promises
- Two processes never both write to one saga: every write carries the fence number its lease was given, and a
  write with an old number is refused (`SagaLeaseLost`), however long its process was paused.
- Every change of state leaves a row in `saga_history`, in the transaction that made the change.

When they do not hold
- The lease ends by the wall clock. Where clocks differ by more than the lease, a second process takes over
  early: the fence still refuses the first one's writes, but its outside call runs twice, and only the
  provider key makes that one effect.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    Index,
    Insert,
    Integer,
    String,
    Table,
    Text,
    Update,
    bindparam,
    cast,
    column,
    delete,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.failures import Permanent, clean_text
from ..core.redaction import redact_text
from ..core.store import begin, in_one_hop, insert, is_postgres, metadata, read

__all__ = [
    # rows
    "CancelAsked",
    "Change",
    "Crowded",
    "HistoryRow",
    "ClaimedSaga",
    "SagaConflict",
    "SagaLeaseLost",
    "SagaRow",
    "StepRow",
    "UnknownSaga",
    # reading and writing
    "claim",
    "create",
    "finish",
    "history",
    "list_sagas",
    "load",
    "note",
    "purge",
    "record",
    "redact",
    "release",
    "write",
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
    Column("cancel", Text),  # asked for while a step was under way: its driver finds it with its next write
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)
Index(
    "saga_due", sagas.c.due_at, sqlite_where=sagas.c.due_at.is_not(None), postgresql_where=sagas.c.due_at.is_not(None)
)
Index("saga_state", sagas.c.state, sagas.c.updated_at)
steps = Table(
    "saga_step",
    metadata,
    Column("saga_id", String(200), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("name", String(100), nullable=False),
    # pending, started, done, undoing, stuck or undone
    Column("state", String(20), nullable=False, default="pending"),
    Column("attempts", Integer, nullable=False, default=0),
    Column("undo_attempts", Integer, nullable=False, default=0),
    Column("since", Double),  # first try in the present direction
    Column("result", JSON(none_as_null=True)),  # NULL until it is known that the step took effect
    Column("sent_at", Double),  # of a request that may have taken effect; 0: it is certainly over
    Column("undo_sent_at", Double),
    Column("retry_at", Double),  # of an undo that failed
    Column("crashes", Integer),
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


class CancelAsked(Exception):
    """Somebody cancelled the saga since it was read: nothing was written, go back from here."""


class Crowded(Exception):
    """One change of several was refused: write them one by one."""


class SagaConflict(Permanent):
    """A saga with this id exists with another name or other data. Use one id per business request."""


class UnknownSaga(Permanent):
    """No saga has this id. `list_sagas` shows those that exist."""


@dataclass(frozen=True)
class StepRow:
    name: str
    position: int
    state: str
    attempts: int
    undo_attempts: int
    since: float | None
    result: dict[str, Any] | None
    sent_at: float | None = None
    undo_sent_at: float | None = None
    retry_at: float | None = None
    crashes: int | None = None


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
    cancel: str | None
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


class ClaimedSaga(NamedTuple):
    """A claimed saga: its fence number is the right to write to it until somebody has a higher one."""

    saga: SagaRow
    taken_over: bool  # from a process that died, or froze, with it


class Change(NamedTuple):
    """What is written at once: the saga, its changed steps and the new lines of its history."""

    saga: SagaRow
    steps: Sequence[StepRow]
    notes: Sequence[Mapping[str, Any]]


def write(tx: Connection, changes: Sequence[Change]) -> None:
    """Each change proves with its fence number that nobody has taken its saga over; else nothing is written."""
    now = time.time()
    # In a fixed order, or two processes that write to the same sagas would deadlock.
    held = [
        {
            **{name: getattr(saga, name) for name in _SAGA_CHANGES},
            "_id": saga.id,
            "_fence": saga.fence,
            "_cancel": saga.cancel or "",
            "updated_at": now,
        }
        for saga in sorted((change.saga for change in changes), key=lambda saga: saga.id)
    ]
    steps = [
        {
            **{name: getattr(row, name) for name in _STEP_CHANGES},
            "result": None if row.result is None else json.dumps(row.result),
            "_saga": change.saga.id,
            "_position": row.position,
        }
        for change in changes
        for row in change.steps
    ]
    notes = [note for change in changes for note in change.notes]
    if _send(tx, _HOLD, held, (_STEP, steps), (_NOTE, notes)) != len(held):
        if len(changes) > 1:
            raise Crowded(Crowded.__doc__)
        _refuse(tx, changes[0].saga)


async def finish(tx: AsyncConnection, work: Callable[[Connection], object]) -> None:
    """The last of a transaction: on SQLite one change of threads with its COMMIT."""
    connection: Any = tx.sync_connection
    last = getattr(connection.connection.dbapi_connection, "finish", None)
    await (last(connection, work) if last else tx.run_sync(work))


def _refuse(tx: Connection, saga: SagaRow) -> None:
    stands = tx.execute(select(sagas.c.fence, sagas.c.cancel).where(sagas.c.id == saga.id)).first()
    if stands is None or stands.fence != saga.fence:
        raise SagaLeaseLost(f"saga {saga.id}: fence {saga.fence} is old. {SagaLeaseLost.__doc__}")
    raise CancelAsked(stands.cancel)


class Batch(NamedTuple):
    """A statement for any number of rows: sent once per row, or once with all rows as JSON.

    The second is for PostgreSQL: psycopg's `executemany` waits for each row, which was two thirds of a runner's time.
    """

    name: str
    each: Update | Insert
    at_once: Callable[[int | None], Update | Insert]  # for at most this many rows, None: for any number


Given = Callable[[str], ColumnElement[Any]]


def batch(build: Callable[[Given], Update | Insert], **types: Any) -> Batch:
    name = f"_{build.__name__}"
    rows = func.json_to_recordset(cast(bindparam(name, type_=Text), JSON))
    # JSON goes as text inside the JSON: PostgreSQL then reads no escapes in it; it refuses some ("\\u0000").
    flat = {name: Text() if isinstance(type_, JSON) else type_ for name, type_ in types.items()}
    given = rows.table_valued(*(column(*each) for each in flat.items())).render_derived("given", with_types=True)

    def at_once(most: int | None) -> Update | Insert:
        # PostgreSQL expects 100 rows unless a LIMIT says otherwise, and reads a whole table to find one.
        new = select(given).limit(most and literal_column(str(most))).subquery("new")
        return build(lambda name: new.c[name] if flat[name] is types[name] else cast(new.c[name], JSON))

    return Batch(name, build(lambda name: bindparam(name, type_=flat[name])), at_once)


Rows = Sequence[Mapping[str, Any]]
FEW = 2  # rows that go with one saga's: a DbStep changes its step and the next one, and tells of both


def _send(tx: Connection, first: Batch, rows: Rows, *more: tuple[Batch, Rows]) -> int:
    """How many rows `first` matched."""
    if tx.dialect.name == "postgresql":  # one statement for all: a DbStep waits for each of its round trips
        few = len(rows) == 1 and all(len(others) <= FEW for _, others in more)
        sql, fixed, _ = _text(tx, _at_once(few, first, *(batch for batch, _ in more)))
        given = {first.name: json.dumps(rows)} | {batch.name: json.dumps(others) for batch, others in more}
        return tx.exec_driver_sql(sql, fixed | given).rowcount
    met = []
    for batch, each in ((first, rows), *more):
        if each:
            sql, fixed, order = _text(tx, batch.each)
            values = [tuple([row.get(name, fixed[name]) for name in order]) for row in each]
            met.append(tx.exec_driver_sql(sql, values).rowcount)
    return met[0]


@cache
def _at_once(few: bool, first: Batch, *more: Batch) -> Update | Insert:
    others = (batch.at_once(FEW if few else None).cte(batch.name) for batch in more)
    return first.at_once(1 if few else None).add_cte(*others)


_texts: dict[Update | Insert, tuple[str, dict[str, Any], Sequence[str]]] = {}


def _text(tx: Connection, statement: Update | Insert) -> tuple[str, dict[str, Any], Sequence[str]]:
    """With its constants and the order of its values. SQLAlchemy's own look-up costs more than the statement."""
    if statement not in _texts:
        made: Any = statement.compile(dialect=tx.dialect)
        _texts[statement] = made.string, made.params, made.positiontup or ()
    return _texts[statement]


def _hold(given: Given) -> Update:
    return (
        update(sagas)
        .where(sagas.c.id == given("_id"), sagas.c.fence == given("_fence"))
        .where(func.coalesce(sagas.c.cancel, "") == given("_cancel"))
        .values({name: given(name) for name in (*_SAGA_CHANGES, "updated_at")})
    )


def _step(given: Given) -> Update:
    return (
        update(steps)
        .where(steps.c.saga_id == given("_saga"), steps.c.position == given("_position"))
        .values({name: given(name) for name in _STEP_CHANGES})
    )


def _free(given: Given) -> Update:
    ours = (sagas.c.id == given("_id"), sagas.c.fence == given("_fence"), sagas.c.owner.is_not(None))
    return update(sagas).where(*ours).values(owner=None, due_at=given("_due"))


def _tell(given: Given) -> Insert:
    return saga_history.insert().from_select(_NOTES, select(*(given(name) for name in _NOTES)))


# Built once: making a statement costs more than sending it.
_SAGA_CHANGES = ("state", "backward", "error", "owner", "due_at", "cancel")
_STEP_CHANGES = tuple(field.name for field in fields(StepRow) if field.name not in ("name", "position"))
_NOTES = ("saga_id", "at", "actor", "step", "event", "detail")
_SAGA_TYPES = {name: sagas.c[name].type for name in (*_SAGA_CHANGES, "updated_at")}
_HOLD = batch(_hold, **_SAGA_TYPES, _id=Text(), _fence=Integer(), _cancel=Text())
_STEP_TYPES = {name: steps.c[name].type for name in _STEP_CHANGES}
_STEP = batch(_step, **_STEP_TYPES, _saga=Text(), _position=Integer())
_FREE = batch(_free, _id=Text(), _fence=Integer(), _due=Double())
_NOTE = batch(_tell, **{name: saga_history.c[name].type for name in _NOTES})


async def create(
    tx: AsyncConnection, saga_id: str, name: str, data: Mapping[str, Any], made: Mapping[str, bool]
) -> bool:
    """Insert the saga in the caller's transaction; `made`: its steps, True for those done with it.

    False: the same saga exists already.
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
    told = [note(saga_id, "caller", "created"), *(note(saga_id, "caller", "done", s) for s in begun)]
    await tx.run_sync(_send, _NOTE, told)
    return True


async def claim(
    store: AsyncEngine, *, owner: str, names: Collection[str], seconds: float, limit: int, saga_id: str | None = None
) -> list[ClaimedSaga]:
    """Take due sagas, oldest first, only of these `names`: those this process defines."""
    now = time.time()
    due = _DUE if saga_id is None else _DUE.where(sagas.c.id == saga_id)
    given = {"_now": now, "_names": list(names), "_limit": limit}

    def look(tx: Connection) -> bool:
        return tx.execute(due.with_only_columns(sagas.c.id), given).first() is not None

    def take(tx: Connection) -> list[ClaimedSaga]:
        rows = tx.execute(due.with_for_update(skip_locked=True), given).mappings().all()
        if not rows:
            return []
        until = {"owner": owner, "due_at": now + seconds}
        tx.execute(_TAKE, {"_ids": [row["id"] for row in rows], **until})
        claimed = _with_steps(tx, [SagaRow(**{**row, **until, "fence": row["fence"] + 1, "steps": ()}) for row in rows])
        before = {row["id"]: row["owner"] for row in rows if row["owner"] is not None}
        if before:
            told = [note(ident, owner, "taken over", None, f"lease of {who} ended") for ident, who in before.items()]
            _send(tx, _NOTE, told)
        return [ClaimedSaga(saga, saga.id in before) for saga in claimed]

    # An idle loop must not take SQLite's one write lock each time it looks.
    if not is_postgres(store) and not await in_one_hop(store, look, write=False):
        return []
    return await in_one_hop(store, take, write=True)


async def release(store: AsyncEngine, held: Sequence[SagaRow], seconds: float) -> None:
    """Make sagas due for anybody after this many seconds, unless taken over since."""
    rows = [{"_id": saga.id, "_fence": saga.fence, "_due": time.time() + seconds} for saga in held]
    await in_one_hop(store, lambda tx: _send(tx, _FREE, rows), write=True)


async def load(store: AsyncEngine, saga_id: str, *, wait: bool = False) -> SagaRow:
    """`wait`: for whoever is changing it, such as a COMMIT that goes on although its answer was given up."""

    def look(tx: Connection) -> SagaRow:
        saga = tx.execute(_SAGA.with_for_update() if wait else _SAGA, {"_id": saga_id}).mappings().first()
        if saga is None:
            raise UnknownSaga(f"{saga_id}: {UnknownSaga.__doc__}")
        return _with_steps(tx, [SagaRow(**saga)])[0]

    return await in_one_hop(store, look, write=wait)


def _with_steps(tx: Connection, bare: Sequence[SagaRow]) -> list[SagaRow]:
    rows: dict[str, list[StepRow]] = {saga.id: [] for saga in bare}
    for ident, *row in tx.execute(_STEPS, {"_ids": list(rows)}):
        rows[ident].append(StepRow(*row))
    return [replace(saga, steps=tuple(rows[saga.id])) for saga in bare]


_SAGA = select(sagas).where(sagas.c.id == bindparam("_id"))
_STEPS = (
    select(steps.c.saga_id, *(steps.c[field.name] for field in fields(StepRow)))
    .where(steps.c.saga_id.in_(bindparam("_ids", expanding=True)))
    .order_by(steps.c.position)
)
_DUE = (
    select(sagas)
    .where(sagas.c.due_at <= bindparam("_now"), sagas.c.name.in_(bindparam("_names", expanding=True)))
    .order_by(sagas.c.due_at)
    .limit(bindparam("_limit"))
)
_TAKE = (
    update(sagas)
    .where(sagas.c.id.in_(bindparam("_ids", expanding=True)))
    .values(fence=sagas.c.fence + 1, owner=bindparam("owner"), due_at=bindparam("due_at"))
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
    query = select(*(saga_history.c[name] for name in _NOTES[1:])).where(saga_history.c.saga_id == saga_id)
    async with read(store) as tx:
        return [HistoryRow(**row) for row in (await tx.execute(query.order_by(saga_history.c.id))).mappings()]


async def purge(store: AsyncEngine, older_than: float, *, batch: int = 500) -> int:
    """Delete up to `batch` sagas that ended more than `older_than` seconds ago. Call again until it returns less."""
    ended = (sagas.c.state.in_(("completed", "compensated")), sagas.c.updated_at < time.time() - older_than)
    async with begin(store) as tx:
        old = (await tx.scalars(select(sagas.c.id).where(*ended).limit(batch))).all()
        for column in (saga_history.c.saga_id, steps.c.saga_id, sagas.c.id):
            await tx.execute(delete(column.table).where(column.in_(old)))
    return len(old)


async def record(
    tx: AsyncConnection, saga_id: str, actor: str, event: str, *, step: str | None = None, detail: str = ""
) -> None:
    await tx.run_sync(_send, _NOTE, [note(saga_id, actor, event, step, detail)])


def note(saga_id: str, actor: str, event: str, step: str | None = None, detail: str = "") -> dict[str, Any]:
    """A line of the history, for `Change`."""
    return {
        "saga_id": saga_id,
        "at": time.time(),
        "actor": clean_text(actor, 200),
        "step": step,
        "event": event,
        "detail": redact(detail) or None if detail else None,
    }


def redact(text: str, limit: int = 1000) -> str:
    """A provider's error text often repeats what it was sent: an e-mail address, a card number, a token."""
    return clean_text(redact_text(text), limit)
